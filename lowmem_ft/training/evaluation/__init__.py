"""Evaluations of a run: the loss on held-out data, the best model so far, and their records."""
