"""Gradients of several micro-batches: their sums, and the order in which they come."""
