"""Several processes: launch, rendezvous, agreement, errors, gradient averaging, DeepSpeed."""
