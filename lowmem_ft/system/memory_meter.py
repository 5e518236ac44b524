"""How much memory this process holds now and at its peak: the device's on CUDA, the host's elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from lowmem_ft.system.process_memory import held_bytes, peak_held_bytes, reset_peak

_peaks_before: dict[str, int] = {}
"""The highest before the last phase began, by device: beginning one makes the system and the driver forget it."""

_watchers: list[Callable[[], None]] = []


@dataclass(frozen=True)
class MemoryReading:
    """Bytes held at one moment and the most held since the process (on CUDA: the last reset) began."""

    now_bytes: int
    peak_bytes: int


def read_device_memory(device: torch.device) -> MemoryReading:
    """Bytes of tensors that torch has allocated on a CUDA device; on a CPU, what the process holds."""
    if device.type == "cuda":
        peak = max(torch.cuda.max_memory_allocated(device), _peaks_before.get(str(device), 0))
        return MemoryReading(torch.cuda.memory_allocated(device), peak)
    return read_host_memory()


def free_device_bytes(device: torch.device) -> int:
    """What tensors may still take of a device: of its memory, and of the allocator's cap; on a CPU, of the machine's.

    What the allocator has cached counts as free, though it may be in pieces.
    """
    if device.type != "cuda":
        return psutil.virtual_memory().available
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cap = round(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device) - allocated, cap - allocated)


def read_host_memory() -> MemoryReading:
    """What this process holds of the host's memory, now and at its peak (see ``system/process_memory.py``)."""
    return MemoryReading(held_bytes(), max(peak_held_bytes(), _peaks_before.get("host", 0)))


def begin_phase(device: torch.device) -> bool:
    """Let :func:`phase_peak_bytes` begin anew; the readings above keep the peak of the whole run.

    Returns:
        Whether it does: the host's peak can be reset on Linux only.
    """
    peaks_will_be_reset()
    if device.type == "cuda":
        _peaks_before[str(device)] = read_device_memory(device).peak_bytes
        torch.cuda.reset_peak_memory_stats(device)
        return True
    before = read_host_memory().peak_bytes
    if not reset_peak():
        return False
    _peaks_before["host"] = before
    return True


@contextlib.contextmanager
def before_each_reset(watcher: Callable[[], None]) -> Iterator[None]:
    """Call a function before peaks begin anew, whoever lets them: what it has not read by then is forgotten.

    Args:
        watcher: is called in this block.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def peaks_will_be_reset() -> None:
    """Tell those who read peaks; :func:`begin_phase` does."""
    for watcher in tuple(_watchers):
        watcher()


def phase_peak_bytes(device: torch.device) -> int:
    """The most held since :func:`begin_phase`: tensors on CUDA, what the process holds on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_held_bytes()
