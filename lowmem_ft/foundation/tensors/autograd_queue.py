"""Cleanup of autograd's engine after an error in backward: ready nodes stay in its queue, and keep their graphs."""

from __future__ import annotations

import torch


class EngineQueue:
    """The queue of autograd's engine, in which an error in backward leaves nodes.

    The engine takes the most recently made node first, and skips nodes of a backward pass that has ended. On a CPU it
    stops once its own backward pass is done and never reaches older nodes; a device has a thread that works through
    them at some later time, maybe after the error has reached the thread that called backward. A backward pass of a
    node older than all of them runs after them.

    Args:
        device: the device of the queue; create this object before anything else is computed there.
    """

    def __init__(self, device: torch.device) -> None:
        self._gradient = torch.ones((), device=device)
        with torch.enable_grad():
            self._leaf = torch.zeros((), device=device, requires_grad=True)
            self._oldest = self._leaf.view(())  # a view: its backward allocates nothing

    def empty(self) -> None:
        """Wait until no node of an earlier backward pass is in the queue or being computed."""
        torch.autograd.grad(self._oldest, self._leaf, self._gradient, retain_graph=True)
