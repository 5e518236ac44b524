"""Autograd's engine after an error in backward: nodes that were ready wait in its queue, graphs behind them."""

from __future__ import annotations

import torch


class EngineQueue:
    """What an error in backward leaves in the queue of autograd's engine.

    The engine takes the node that was made last first, and passes over those of a backward that is over. On a CPU it
    stops once its own backward is done, so that older ones are never reached; those of a device have a thread that goes
    through them, at some time, maybe after the error has come to the thread that called backward. A backward of a node
    that is older than all of theirs comes after them.

    Args:
        device: whose queue; make it before anything else is computed there.
    """

    def __init__(self, device: torch.device) -> None:
        self._gradient = torch.ones((), device=device)
        with torch.enable_grad():
            self._leaf = torch.zeros((), device=device, requires_grad=True)
            self._oldest = self._leaf.view(())  # whose backward allocates nothing

    def empty(self) -> None:
        """Return once nothing of an earlier backward is in it, nor being computed."""
        torch.autograd.grad(self._oldest, self._leaf, self._gradient, retain_graph=True)
