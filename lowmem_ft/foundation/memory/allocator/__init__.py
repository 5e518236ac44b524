"""PyTorch's CUDA caching allocator, simulated without a GPU."""
