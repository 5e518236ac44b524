"""Optimizer state of one parameter: its parts, and where they are stored."""
