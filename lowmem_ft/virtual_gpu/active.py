"""The virtual GPU whose ``with`` block is running: a process has one at a time, as there is one ``cuda:0``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.virtual_gpu.recording.recorder import Recorder
from lowmem_ft.virtual_gpu.replay.memory_counters import MemoryCounters

DEVICE_TYPE = "vgpu"


class ActiveGpu(Protocol):
    """The part of :class:`lowmem_ft.virtual_gpu.gpu.VirtualGPU` that the device, its streams and its kernels use."""

    spec: Gpu
    recorder: Recorder
    counters: MemoryCounters
    cap_bytes: int | None

    def outside_bytes(self) -> int:
        """Return the device bytes that a process holds outside torch's allocator."""
        ...

    def say(self, choice: str) -> None:
        """Note a decision that users should see."""
        ...


_active: ActiveGpu | None = None


def active_gpu() -> ActiveGpu:
    """Return the virtual GPU whose ``with`` block is running."""
    assert _active is not None, "the device vgpu has no memory outside `with VirtualGPU(...)`"
    return _active


def active_gpu_or_none() -> ActiveGpu | None:
    """Return the virtual GPU whose ``with`` block is running; None outside of such blocks."""
    return _active


@contextlib.contextmanager
def activated(gpu: ActiveGpu | None) -> Iterator[None]:
    """Make a virtual GPU the active one in a block; with None, no GPU is active."""
    global _active
    before, _active = _active, gpu
    try:
        yield
    finally:
        _active = before
