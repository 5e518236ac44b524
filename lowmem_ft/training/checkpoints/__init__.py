"""Checkpoints: folders that are whole or absent, and the files in them."""
