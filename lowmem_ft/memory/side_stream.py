"""A stream beside the one that computes, for work that the next computing need not wait for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from lowmem_ft.devices import kernels_of


class SideStream:
    """A second stream that computes; on a CPU, where all is done at once, there is none.

    Memory that is allocated in a fork comes from this stream's pool, and may be let go in one. What was allocated
    outside and is used inside has to be kept until the streams have joined.

    Args:
        device: which device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_joined = True
        self._is_asynchronous = kernels_of(device) == "cuda"
        if self._is_asynchronous:
            self._module: Any = torch.get_device_module(device)
            self._stream = self._module.Stream(device)

    @contextlib.contextmanager
    def forked(self) -> Iterator[None]:
        """What is given to the device in a ``with`` block comes after all so far, and beside what comes next."""
        if not self._is_asynchronous:
            yield
            return
        self._stream.wait_event(self._module.current_stream(self._device).record_event())
        self._is_joined = False
        with self._module.stream(self._stream):
            yield

    def join(self) -> None:
        """Let the current stream's further work wait for all forks so far."""
        if not self._is_joined:
            self._module.current_stream(self._device).wait_event(self._stream.record_event())
            self._is_joined = True
