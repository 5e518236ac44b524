"""The device without hardware whose block is running, as code that trains or measures sees it.

``lowmem_ft/virtual_gpu`` makes such devices. Code can ask whether one is active without importing that package.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from lowmem_ft.foundation.errors import UserError

DEVICE_TYPE = "vgpu"


class VirtualDevice(Protocol):
    """A device without hardware, on which the programs of a block run."""

    def outside_bytes(self) -> int:
        """Return the device bytes that a process holds on it outside torch's allocator."""
        ...

    def snapshots(self) -> Callable[[], dict[str, Any]]:
        """Return a function that makes a snapshot, as torch's allocator does, of what happens from now on."""
        ...


_active: VirtualDevice | None = None


def active_device() -> VirtualDevice | None:
    """Return the virtual device whose ``with`` block is running; None outside of such blocks."""
    return _active


def has_virtual_device() -> bool:
    """Return whether this process has had a virtual device: torch keeps it for good."""
    return hasattr(torch, DEVICE_TYPE)


def refuse_after_virtual_gpu(device: torch.device) -> None:
    """Refuse to train on a real GPU once this process has had a virtual one.

    torch treats a device that Python registers as the machine's accelerator: pinned memory fails, and a backward pass
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
def activated(device: VirtualDevice | None) -> Iterator[None]:
    """Make a virtual device the active one in a block; with None, none is active.

    A process has one at a time, as there is one ``cuda:0``.
    """
    global _active
    before, _active = _active, device
    try:
        yield
    finally:
        _active = before
