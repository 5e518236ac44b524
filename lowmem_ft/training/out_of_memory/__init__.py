"""Out-of-memory errors: their diagnosis, retries of a step, and the message."""
