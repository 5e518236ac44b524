"""Device memory that this process holds now and at its peak, by CUDA's counters; on a CPU, host memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import torch

from lowmem_ft.foundation.system.host_memory import (
    MemoryReading,
    peak_held_bytes,
    read_host_memory,
    reset_peak,
)

_peaks_before: dict[str, int] = {}
"""Highest peak before the last phase began, by CUDA device: beginning one resets the peak of the allocator."""

_watchers: list[Callable[[], None]] = []


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


def begin_phase(device: torch.device) -> bool:
    """Restart :func:`phase_peak_bytes`; the readings above keep the peak of the whole run.

    Returns:
        True if the peak was reset: for the host's peak, only Linux can.
    """
    peaks_will_be_reset()
    if device.type != "cuda":
        return reset_peak()
    _peaks_before[str(device)] = read_device_memory(device).peak_bytes
    torch.cuda.reset_peak_memory_stats(device)
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


class ProcessBytes:
    """Reads all that this process holds of a CUDA device: tensors, cache, context, and memory of other libraries.

    NVML (package nvidia-ml-py) counts by process, but by the host's process ids: in a container it does not know ours.
    Then the count is all that is used on the device, minus what others held when this object was made.

    Args:
        device: a CUDA device.
        held_by_others_bytes: bytes of it that other processes hold.
    """

    def __init__(self, device: torch.device, held_by_others_bytes: int = 0) -> None:
        self._device = device
        self._others = held_by_others_bytes
        self._nvml, self._handle = _nvml_and_handle(device)

    def read(self) -> tuple[int, str]:
        """Return bytes now, and the source of the number."""
        own = self._by_nvml()
        if own is not None:
            return own, "NVML, this process"
        free, total = torch.cuda.mem_get_info(self._device)
        if self._others:
            return total - free - self._others, "cudaMemGetInfo, less what others held at the beginning"
        return total - free, "cudaMemGetInfo, the whole device"

    def _by_nvml(self) -> int | None:
        """Return NVML's count; None if NVML does not know this process, or its part of a GPU."""
        if self._handle is None:
            return None
        try:
            processes = self._nvml.nvmlDeviceGetComputeRunningProcesses(self._handle)
        except self._nvml.NVMLError:
            return None
        return next((process.usedGpuMemory for process in processes if process.pid == os.getpid()), None)


def _nvml_and_handle(device: torch.device) -> tuple[Any, Any]:
    try:
        import pynvml  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()  # once per process: it counts its calls
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # its index may differ from torch's
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return pynvml, None
