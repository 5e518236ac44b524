"""The terminal: parsers, help, logs, errors, exit codes, tables."""
