"""Autocast and the state of random numbers, kept in order to repeat a computation with the same numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch


def autocast_of_now(device: torch.device) -> Callable[[], torch.autocast]:
    """Return a function that makes autocast as it is at this moment, for a ``with`` block later."""
    return partial(
        torch.autocast,
        device.type,
        dtype=torch.get_autocast_dtype(device.type),
        enabled=torch.is_autocast_enabled(device.type),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


class AutocastState:
    """Autocast and RNG state at some moment, to repeat the same computation later."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._autocast = autocast_of_now(device)
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._host_state = torch.get_rng_state()
        self._device_state: Any = None if self._module is None else self._module.get_rng_state(device)

    def has_drawn(self) -> bool:
        """Return whether random numbers have been drawn since that moment."""
        if not torch.equal(torch.get_rng_state(), self._host_state):
            return True
        if self._module is None:
            return False
        return not torch.equal(self._module.get_rng_state(self._device), self._device_state)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Put both back in a ``with`` block, and then what was there before."""
        devices = [] if self._module is None else [self._device]
        with (
            torch.random.fork_rng(devices, device_type=self._device.type),
            self._autocast(),
        ):
            torch.set_rng_state(self._host_state)
            if self._module is not None:
                self._module.set_rng_state(self._device_state, self._device)
            yield
