"""Callbacks of a run: the values that they receive, and how they ask it to stop; early stopping is one of them."""
