"""The fp16 loss scale, for gradients that are not in the ``.grad`` fields where ``GradScaler`` looks for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def unscale(scaler: torch.amp.GradScaler, values: Tensor) -> None:  # type: ignore[attr-defined]
    """Divide values by the loss scale, in place; if one is not finite, the next ``update()`` lowers the scale.

    Args:
        scaler: the scaler that scaled the loss of this step; its ``update()`` ends the step.
        values: fp32 values, such as the norm of all gradients and 1.
    """
    holder = nn.Parameter(torch.empty_like(values))
    holder.grad = values
    scaler.unscale_(torch.optim.SGD([holder]))
