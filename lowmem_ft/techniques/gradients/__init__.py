"""Norms, slices and sums of gradients, for the techniques and optimizers that need them."""
