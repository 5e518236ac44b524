"""Out-of-memory errors: budget limits, step retries, the error message and remediations."""
