"""Fused operators of Liger's in place of the several that transformers' layers run one after the other."""
