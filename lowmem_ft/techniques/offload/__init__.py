"""Tensors kept in host memory: activations, and the optimizer's state."""
