"""Tokens from an example's columns, and the choice of those to learn."""
