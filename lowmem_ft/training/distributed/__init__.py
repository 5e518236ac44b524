"""Runs in several processes: launch, rendezvous, agreement, errors, gradient averaging, DeepSpeed."""
