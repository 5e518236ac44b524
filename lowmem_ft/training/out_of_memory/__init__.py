"""Memory that runs out: budget limits, step retries, the error and what to change."""
