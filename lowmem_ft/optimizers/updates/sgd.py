"""SGD with momentum: the running average of the gradient is the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.optimizers.updates.update_rule import Chunk, Step


class SGD:
    """Stochastic gradient descent with momentum, operation by operation as torch computes it.

    Frees: one of AdamW's two states; with ``momentum=0`` both.
    Costs: one learning rate for all directions, far larger than AdamW's, and more steps on transformers.
    Equals: ``torch.optim.SGD(foreach=False, fused=False)`` in float32, bit for bit.
    """

    def averages(self, shape: torch.Size, hyperparameters: Mapping[str, Any]) -> dict[str, bool]:
        """Return the momentum, unless it is 0."""
        return {"momentum_buffer": True} if hyperparameters["momentum"] != 0 else {}

    def step(self, number: int, hyperparameters: Mapping[str, Any]) -> Step:
        """Return the update, from ``lr``, ``momentum`` and ``weight_decay``, an L2 penalty added to the gradient."""
        weight_decay, momentum = hyperparameters["weight_decay"], hyperparameters["momentum"]

        def update(weight: Tensor, chunk: Chunk) -> None:
            direction = chunk.gradient
            if weight_decay != 0:
                direction = direction.add(weight, alpha=weight_decay)
            if momentum != 0:
                direction = chunk.averages["momentum_buffer"].mul_(momentum).add_(direction)
            weight.add_(direction, alpha=-hyperparameters["lr"])

        return update
