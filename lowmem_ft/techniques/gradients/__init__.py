"""Norms, parts and sums of gradients, for the techniques and optimizers that need them."""
