"""Sources of rows: the list of them, and their splits."""
