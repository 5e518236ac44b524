"""Host memory next to a device: pinned memory, mapped files, asynchronous copies."""
