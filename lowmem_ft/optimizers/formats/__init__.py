"""Formats of master weights and optimizer state, and their arithmetic as torch operators."""
