"""The fp16 loss scale, also for gradients that are not in the ``.grad`` fields where ``GradScaler`` looks for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LossScale:
    """The loss scale of a run; without a scaler, nothing is scaled.

    Args:
        scaler: torch's ``GradScaler``; None unless the run computes in fp16.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None) -> None:  # type: ignore[attr-defined]
        self.scaler = scaler

    def unscale(self, values: Tensor) -> None:
        """Divide values by the loss scale, in place; if one is not finite, the next :meth:`update` lowers the scale.

        Args:
            values: fp32 values, such as the norm of all gradients and 1; the loss of this step was scaled.
        """
        if self.scaler is not None:
            holder = nn.Parameter(torch.empty_like(values))
            holder.grad = values
            self.scaler.unscale_(torch.optim.SGD([holder]))

    def may_overflow(self) -> bool:
        """Return True under fp16 while the scale is at least 1: below that the gradients overflow by themselves."""
        return self.scaler is not None and self.scaler.get_scale() >= 1

    def update(self) -> None:
        """Update the scale by what the scaler found while unscaling; this ends the step."""
        if self.scaler is not None:
            self.scaler.update()

    def state(self) -> dict[str, Any] | None:
        """Return the state of the ``GradScaler``; None without one."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the ``GradScaler``, if there is one."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state)
