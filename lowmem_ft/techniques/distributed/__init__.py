"""A model shared among several processes."""
