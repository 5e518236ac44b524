"""Optimizer state: its storage, the names by which it is saved, conversion between formats and shards."""
