"""A second compute stream, for work that overlaps with the work queued just before it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lowmem_ft.foundation.devices import kernels_of


class SideStream:
    """A second stream that computes; on a CPU there is one order of work, and this class does nothing.

    Memory that is allocated inside the block comes from this stream's pool, and may be freed there. Memory that was
    allocated outside and is used inside must be kept until the end of the block.

    Args:
        device: the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_forked = False
        self._is_asynchronous = kernels_of(device) == "cuda"
        if self._is_asynchronous:
            self._module: Any = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    def fork(self) -> None:
        """Order this stream's further work after all compute so far, and concurrent with what comes next."""
        if self._is_asynchronous:
            self._stream.wait_event(self._module.current_stream(self._device).record_event())
            self._is_forked = True

    def forget_fork(self) -> None:
        """Order the next work after all compute before it, whenever the streams last forked."""
        self._is_forked = False

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Queue the work of a ``with`` block on this stream: concurrent with all compute since the fork, if any.

        Compute after the block waits for it.
        """
        if not self._is_asynchronous:
            yield
            return
        if not self._is_forked:
            self.fork()
        self._is_forked = False
        try:
            with self._module.stream(self._stream):
                yield
        finally:
            self._module.current_stream(self._device).wait_event(self._stream.record_event())
