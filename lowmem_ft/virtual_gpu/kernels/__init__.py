"""What CUDA's kernels do: which one runs, the shapes and types it makes, the memory it takes, its operations."""
