"""Triton on the virtual GPU: each launch of a kernel is one operator of the trace, and none is compiled."""
