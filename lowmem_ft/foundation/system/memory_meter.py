"""Memory that this process holds now and at its peak: the device's on CUDA, the host's elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil
import torch

from lowmem_ft.foundation.system.process_memory import held_bytes, peak_held_bytes, reset_peak

_peaks_before: dict[str, int] = {}
"""Highest peak before the last phase began, by device: beginning one resets the peak of the system and the driver."""

_watchers: list[Callable[[], None]] = []


@dataclass(frozen=True)
class MemoryReading:
    """Bytes held at one moment and the most held since the process (on CUDA: the last reset) began."""

    now_bytes: int
    peak_bytes: int


def read_device_memory(device: torch.device) -> MemoryReading:
    """Return bytes of tensors that torch has allocated on a CUDA device; on a CPU, bytes that the process holds."""
    if device.type == "cuda":
        peak = max(torch.cuda.max_memory_allocated(device), _peaks_before.get(str(device), 0))
        return MemoryReading(torch.cuda.memory_allocated(device), peak)
    return read_host_memory()


def free_device_bytes(device: torch.device) -> int:
    """Return bytes that tensors may still take of a device, within the allocator's cap; on a CPU, of the machine's RAM.

    Memory that the allocator has cached counts as free, though it may be in pieces.
    """
    if device.type != "cuda":
        return psutil.virtual_memory().available
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    cap = round(torch.cuda.get_per_process_memory_fraction(device) * total)
    return min(free + torch.cuda.memory_reserved(device) - allocated, cap - allocated)


def read_host_memory() -> MemoryReading:
    """Return host memory that this process holds, now and at its peak (see ``foundation/system/process_memory.py``)."""
    return MemoryReading(held_bytes(), max(peak_held_bytes(), _peaks_before.get("host", 0)))


def begin_phase(device: torch.device) -> bool:
    """Restart :func:`phase_peak_bytes`; the readings above keep the peak of the whole run.

    Returns:
        True if the peak was reset: for the host's peak, only Linux can.
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
    """Call a function before any code resets peaks: a peak that it has not read by then is lost.

    Args:
        watcher: the function, called within this block.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def peaks_will_be_reset() -> None:
    """Call the watchers before a reset; :func:`begin_phase` does so itself."""
    for watcher in tuple(_watchers):
        watcher()


def phase_peak_bytes(device: torch.device) -> int:
    """Return the most held since :func:`begin_phase`: bytes of tensors on CUDA, of the process on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_held_bytes()
