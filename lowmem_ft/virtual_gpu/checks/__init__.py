"""Refusals of what CUDA would refuse: devices, types and arguments of operators."""
