"""Models of CUDA's kernels: which one runs, its shapes and types, the memory it takes, its operations."""
