"""The attention kernel that a model trains with, and kernels that transformers does not have."""
