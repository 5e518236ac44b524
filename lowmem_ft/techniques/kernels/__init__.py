"""Liger's fused operators in place of the several that transformers' layers run one after the other."""
