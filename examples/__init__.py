"""Applications to read, run and copy."""
