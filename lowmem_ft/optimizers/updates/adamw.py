"""AdamW: a step along the gradient's running average, as long for small gradients as for large ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.devices import kernels_of
from lowmem_ft.optimizers.updates.update_rule import Chunk, Step


class AdamW:
    """Adam with decoupled weight decay, operation by operation as torch computes it.

    Equals: ``torch.optim.AdamW`` in float32: bit for bit with ``foreach=False, fused=False``, on CUDA with
    ``fused=True``, whose kernel it calls. Where the Triton kernel updates, every operation is rounded alone, and
    last bits differ.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """

    def averages(self, shape: torch.Size, hyperparameters: Mapping[str, Any]) -> dict[str, bool]:
        """Return the averages of the gradient and of its square, which has no sign."""
        return {"exp_avg": True, "exp_avg_sq": False}

    def step(self, number: int, hyperparameters: Mapping[str, Any]) -> Step:
        """Return the update, from ``lr``, ``betas``, ``eps`` and ``weight_decay``."""

        def update(weight: Tensor, chunk: Chunk) -> None:
            run = _in_one_kernel if kernels_of(weight.device) == "cuda" else _in_torchs_operations
            averages = chunk.averages["exp_avg"], chunk.averages["exp_avg_sq"]
            run(weight, chunk.gradient, *averages, number, hyperparameters)

        return update


def _in_torchs_operations(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    number: int,
    hyperparameters: Mapping[str, Any],
) -> None:
    lr, weight_decay = hyperparameters["lr"], hyperparameters["weight_decay"]
    beta1, beta2 = hyperparameters["betas"]
    if weight_decay != 0:
        weight.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    denominator = exp_avg_sq.sqrt().div_((1 - beta2**number) ** 0.5).add_(hyperparameters["eps"])
    weight.addcdiv_(exp_avg, denominator, value=-(lr / (1 - beta1**number)))


def _in_one_kernel(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    number: int,
    hyperparameters: Mapping[str, Any],
) -> None:
    beta1, beta2 = hyperparameters["betas"]
    torch._fused_adamw_(
        [weight],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [weight.new_full((), float(number))],
        lr=hyperparameters["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=hyperparameters["weight_decay"],
        eps=hyperparameters["eps"],
        amsgrad=False,
        maximize=False,
    )
