"""A stream beside the one that computes, for work that goes beside what was computed just before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lowmem_ft.foundation.devices import kernels_of


class SideStream:
    """A second stream that computes; on a CPU, where all is done at once, there is none.

    Memory that is allocated beside the computing comes from this stream's pool, and may be let go there. What was
    allocated outside and is used inside has to be kept until the end of the block.

    Args:
        device: which device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_forked = False
        self._is_asynchronous = kernels_of(device) == "cuda"
        if self._is_asynchronous:
            self._module: Any = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    def fork(self) -> None:
        """Let this stream's further work come after all computing so far, and beside what comes next."""
        if self._is_asynchronous:
            self._stream.wait_event(self._module.current_stream(self._device).record_event())
            self._is_forked = True

    def forget_fork(self) -> None:
        """Let the next work come after all computing before it, whenever the streams last forked."""
        self._is_forked = False

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """In a ``with`` block, give work to this stream: beside all computing since the fork, if there was one.

        Further computing waits for it.
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
