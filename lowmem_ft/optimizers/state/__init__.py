"""Optimizer state: where it is stored, by which names it is saved, how it changes format or shard."""
