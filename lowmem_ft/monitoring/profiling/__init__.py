"""Time of training steps by operator and module, from torch's profiler."""
