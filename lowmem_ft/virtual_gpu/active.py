"""The virtual GPU whose ``with`` block is running: a process has one at a time, as there is one ``cuda:0``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from lowmem_ft.foundation.errors import UserError

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


def has_virtual_device() -> bool:
    """Return whether this process has had a virtual GPU: torch keeps its device for good."""
    return hasattr(torch, DEVICE_TYPE)


def refuse_after_virtual_gpu(device: torch.device) -> None:
    """Refuse to train on a real GPU once this process has had a virtual one.

    torch takes a device that Python registers for the machine's accelerator: pinned memory fails, and a backward pass
    no longer runs on the streams of its forward.

    Raises:
        UserError: if the process has had one and the device is real.
    """
    if device.type == "cuda" and has_virtual_device() and _active is None:
        raise UserError(
            "A process that has had a virtual GPU cannot train on a real one: torch takes the virtual GPU for the "
            "machine's accelerator from then on. Put `with VirtualGPU(...)` into a program of its own. "
            "lowmem_ft.estimate_memory, plan and rehearse may precede lowmem_ft.train: they use another process here."
        )


@contextlib.contextmanager
def activated(gpu: VirtualGPU | None) -> Iterator[None]:
    """Make a virtual GPU the active one in a block; with None, no GPU is active."""
    global _active
    before, _active = _active, gpu
    try:
        yield
    finally:
        _active = before
