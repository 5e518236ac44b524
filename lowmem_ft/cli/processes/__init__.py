"""Processes that a command starts, and signals that end it."""
