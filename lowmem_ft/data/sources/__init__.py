"""Sources of rows: local files, the hub, splits."""
