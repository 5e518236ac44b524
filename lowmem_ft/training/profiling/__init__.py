"""Profiles of a run's steps, and what they say about its recipe."""
