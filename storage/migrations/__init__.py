"""Forward migrations of the schema, run by `perdure migrate`; safe when several processes run it at once."""
