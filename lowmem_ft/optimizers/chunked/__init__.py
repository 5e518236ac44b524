"""The optimizer that updates in chunks: slices, its state by name, and a trial of Triton's kernels."""
