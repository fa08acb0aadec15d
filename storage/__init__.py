"""The ground floor: the shared vocabulary, and every line of SQL and every database client."""
