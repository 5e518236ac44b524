"""The virtual GPU whose ``with`` block is running: there is one at a time in a process, as there is one ``cuda:0``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.virtual_gpu.recording.recorder import Recorder
from lowmem_ft.virtual_gpu.replay.memory_counters import MemoryCounters

DEVICE_TYPE = "vgpu"


class ActiveGpu(Protocol):
    """What the device, its streams and its kernels ask of a :class:`lowmem_ft.virtual_gpu.gpu.VirtualGPU`."""

    spec: Gpu
    recorder: Recorder
    counters: MemoryCounters
    cap_bytes: int | None

    def outside_bytes(self) -> int:
        """What a process holds beside what torch's allocator holds."""
        ...

    def say(self, choice: str) -> None:
        """Note a decision that users should hear of."""
        ...


_active: ActiveGpu | None = None


def active_gpu() -> ActiveGpu:
    """The virtual GPU whose ``with`` block is running."""
    assert _active is not None, "the device vgpu has no memory outside `with VirtualGPU(...)`"
    return _active


def active_gpu_or_none() -> ActiveGpu | None:
    """The same; None outside of such blocks."""
    return _active


@contextlib.contextmanager
def activated(gpu: ActiveGpu | None) -> Iterator[None]:
    """Let a virtual GPU be the one that is there, in a block; None: there is none."""
    global _active
    before, _active = _active, gpu
    try:
        yield
    finally:
        _active = before
