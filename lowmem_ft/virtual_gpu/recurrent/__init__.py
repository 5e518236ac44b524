"""Layers with a recurrent state (gated delta rule, Mamba, short convolutions) as the kernels of packages compute them.

``package_functions`` lists the functions and lets models call them; every other file has the kernels of one function:
what they allocate, save for backward, read, write and multiply, in their package's order.
"""
