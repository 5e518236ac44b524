"""Frozen weights in fewer bits: linear layers and fused experts."""
