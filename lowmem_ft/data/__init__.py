"""Training data, from files or the hub to the micro-batches of an optimizer step."""
