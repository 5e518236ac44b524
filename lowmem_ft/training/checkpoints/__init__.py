"""Checkpoints: folders that are complete or absent, and the files in them."""
