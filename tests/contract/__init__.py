"""One suite for the storage seam, run on every engine."""
