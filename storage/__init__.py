"""The lowest floor: the model, the errors, and the only code that knows SQL and database clients."""
