"""Detection of work on memory that no event, wait or synchronisation orders."""
