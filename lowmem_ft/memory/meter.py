"""How much memory this process holds now and at its peak: the device's on CUDA, the host's (resident) elsewhere."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import psutil
import torch


@dataclass(frozen=True)
class MemoryReading:
    """Bytes held at one moment and the most held since the process (on CUDA: the last reset) began."""

    now_bytes: int
    peak_bytes: int


def read_device_memory(device: torch.device) -> MemoryReading:
    """Bytes of tensors that torch has allocated on a CUDA device; on a CPU, the resident memory of the process."""
    if device.type == "cuda":
        return MemoryReading(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    return read_host_memory()


def read_host_memory() -> MemoryReading:
    """Resident memory of this process, now and at its peak."""
    memory = psutil.Process(os.getpid()).memory_info()
    if sys.platform == "win32":
        return MemoryReading(memory.rss, memory.peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
    return MemoryReading(memory.rss, max(peak_bytes, memory.rss))
