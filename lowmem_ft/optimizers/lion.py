"""Lion: the sign of an interpolated momentum; one state instead of AdamW's two."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

CHUNK_ELEMENTS = 2**23
"""Elements updated at a time: six float32 temporaries, 200 MB, however large the embedding is."""


def lion_update(
    weight: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> tuple[Tensor, Tensor]:
    """The weight and the momentum after one step, both in float32 so that each is rounded only once.

    Args:
        weight: any floating type and shape.
        gradient: same shape.
        momentum: same shape; zeros before the first step.
        lr: step size: every element moves by exactly this much (unless its momentum and gradient are zero).
        betas: weights of the momentum in the step's direction and in the next momentum.
        weight_decay: decoupled; each step takes ``lr * weight_decay`` of the weight.

    Returns:
        New weight and new momentum; the arguments are left as they were.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    weight, gradient, momentum = weight.to(wide), gradient.to(wide), momentum.to(wide)
    direction = torch.lerp(gradient, momentum, betas[0]).sign_()
    new_weight = weight.mul(1 - lr * weight_decay).sub_(direction, alpha=lr)
    return new_weight, torch.lerp(gradient, momentum, betas[1])


class Lion(Optimizer):
    """Evolved sign momentum: half of AdamW's state, for a step that ignores how large the gradient is.

    Frees: one of AdamW's two states; what is left takes the weight's type (4 bytes a float32 parameter).
    Costs: other mathematics. Each element moves by ``lr`` whatever its gradient, so take a learning rate 3 to
    10 times smaller than AdamW's, and a weight decay 3 to 10 times larger: that keeps their product.
    Small batches hurt it more than AdamW: the paper found its gains from 64 examples upwards.

    Args:
        params: parameters or parameter groups.
        lr: step size.
        betas: weights of the momentum in the step's direction and in the next momentum.
        weight_decay: decoupled weight decay.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients again.

        Returns:
            The closure's loss, or None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: nn.Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        hyperparameters = {key: group[key] for key in ("lr", "betas", "weight_decay")}
        chunks = zip(
            _row_chunks(parameter), _row_chunks(gradient), _row_chunks(state["momentum"]), strict=True
        )
        for weight_chunk, gradient_chunk, momentum_chunk in chunks:
            weight, momentum = lion_update(weight_chunk, gradient_chunk, momentum_chunk, **hyperparameters)
            weight_chunk.copy_(weight)
            momentum_chunk.copy_(momentum)


def _row_chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    """Views of whole rows, CHUNK_ELEMENTS or one row long; never a copy, whatever the strides."""
    rows = torch.atleast_1d(tensor)
    return rows.split(max(1, CHUNK_ELEMENTS // max(1, rows[:1].numel())))
