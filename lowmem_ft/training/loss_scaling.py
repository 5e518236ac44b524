"""The fp16 loss scale, for gradients that are not where ``GradScaler`` looks for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def unscale(scaler: torch.amp.GradScaler, values: Tensor) -> None:  # type: ignore[attr-defined]
    """Divide by the loss scale, in place; if one of the values is not finite, the next ``update()`` lowers the scale.

    Args:
        scaler: as it scaled the loss of this step; its ``update()`` ends the step.
        values: fp32, such as the norm of all gradients and 1.
    """
    holder = nn.Parameter(torch.empty_like(values))
    holder.grad = values
    scaler.unscale_(torch.optim.SGD([holder]))
