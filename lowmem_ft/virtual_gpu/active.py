"""The virtual GPU whose ``with`` block is running: a process has one at a time, as there is one ``cuda:0``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.gpu import VirtualGPU

DEVICE_TYPE = "vgpu"


_active: VirtualGPU | None = None


def active_gpu() -> VirtualGPU:
    """Return the virtual GPU whose ``with`` block is running."""
    assert _active is not None, "the device vgpu has no memory outside `with VirtualGPU(...)`"
    return _active


def active_gpu_or_none() -> VirtualGPU | None:
    """Return the virtual GPU whose ``with`` block is running; None outside of such blocks."""
    return _active


@contextlib.contextmanager
def activated(gpu: VirtualGPU | None) -> Iterator[None]:
    """Make a virtual GPU the active one in a block; with None, no GPU is active."""
    global _active
    before, _active = _active, gpu
    try:
        yield
    finally:
        _active = before
