"""Lion: the sign of an interpolated momentum; one state instead of AdamW's two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.optimizers.updates.update_rule import Chunk, Step


class Lion:
    """Evolved sign momentum: half of AdamW's state, for a step that ignores the gradient's magnitude.

    Frees: one of AdamW's two states.
    Costs: other mathematics. Each element moves by ``lr`` whatever its gradient, so use a learning rate 3 to
    10 times smaller than AdamW's, and a weight decay 3 to 10 times larger: that keeps their product.
    Small batches hurt it more than AdamW: the paper found its gains from 64 examples upwards.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
    """

    def averages(self, shape: torch.Size, hyperparameters: Mapping[str, Any]) -> dict[str, bool]:
        """Return the momentum, which has a sign."""
        return {"momentum": True}

    def step(self, number: int, hyperparameters: Mapping[str, Any]) -> Step:
        """Return the update, from ``lr``, ``betas`` and decoupled ``weight_decay``."""
        lr, weight_decay = hyperparameters["lr"], hyperparameters["weight_decay"]
        beta_of_step, beta_of_momentum = hyperparameters["betas"]

        def update(weight: Tensor, chunk: Chunk) -> None:
            momentum = chunk.averages["momentum"]
            direction = torch.lerp(chunk.gradient, momentum, beta_of_step).sign_()
            weight.mul_(1 - lr * weight_decay).sub_(direction, alpha=lr)
            torch.lerp(chunk.gradient, momentum, beta_of_momentum, out=momentum)

        return update
