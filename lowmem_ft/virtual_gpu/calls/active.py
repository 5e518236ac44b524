"""The virtual GPU whose ``with`` block is running, by its own type."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lowmem_ft.foundation.virtual_device import active_device

if TYPE_CHECKING:
    from lowmem_ft.virtual_gpu.gpu import VirtualGPU


def active_gpu() -> VirtualGPU:
    """Return the virtual GPU whose ``with`` block is running."""
    gpu = active_gpu_or_none()
    assert gpu is not None, "the device vgpu has no memory outside `with VirtualGPU(...)`"
    return gpu


def active_gpu_or_none() -> VirtualGPU | None:
    """Return the virtual GPU whose ``with`` block is running; None outside of such blocks."""
    return cast("VirtualGPU | None", active_device())
