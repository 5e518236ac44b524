"""Out-of-memory errors: budget limits, step retries and the error message."""
