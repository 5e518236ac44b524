"""The optimizers of torch and transformers: AdamW and SGD, fused where torch can, and Adafactor."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.optim import Optimizer

from lowmem_ft.devices import kernels_of

logger = logging.getLogger(__name__)

_ADAMW_FUSED_ON = ("cuda", "cpu")
# Not on the CPU: there, up to torch 2.13, a fused step leaves bfloat16 and float16 weights as they were
# (pytorch#191763).
_SGD_FUSED_ON = ("cuda",)


def build_adamw(groups: list[dict[str, Any]], **hyperparameters: Any) -> Optimizer:
    """AdamW of torch: the reference that every other optimizer is measured against.

    Costs: two states in the weight's type, 8 bytes a float32 parameter. Fused, it makes no temporaries and
    rounds a bfloat16 weight once a step, its decay included.

    Args:
        groups: parameter groups with their weight decay.
        **hyperparameters: ``lr``, ``betas`` and ``eps``.

    Returns:
        The optimizer.

    Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019.
    """
    return torch.optim.AdamW(groups, fused=_can_fuse("AdamW", groups, _ADAMW_FUSED_ON), **hyperparameters)


def build_sgd(groups: list[dict[str, Any]], **hyperparameters: Any) -> Optimizer:
    """SGD of torch, with momentum; with ``momentum=0`` it keeps no state at all.

    Frees: one of AdamW's two states, or both.
    Costs: one learning rate for all directions, far larger than AdamW's, and more steps on transformers.

    Args:
        groups: parameter groups with their weight decay (an L2 penalty here, not decoupled).
        **hyperparameters: ``lr`` and ``momentum``.

    Returns:
        The optimizer.
    """
    return torch.optim.SGD(groups, fused=_can_fuse("SGD", groups, _SGD_FUSED_ON), **hyperparameters)


def build_adafactor(groups: list[dict[str, Any]], **hyperparameters: Any) -> Optimizer:
    """Adafactor of transformers: the second moment kept as a row and a column a matrix, no first moment.

    Its learning rate is the recipe's, as with ``Trainer(optim="adafactor")``; try AdamW's first. Not torch's
    Adafactor: that one always multiplies the learning rate by the size of the weights, and keeps the second
    moment of bfloat16 weights in bfloat16, where an average over hundreds of steps stands still.

    Frees: all but about 1/500 of AdamW's state.
    Costs: no momentum; two or three float32 temporaries of the largest parameter while it is updated.

    Args:
        groups: parameter groups with their weight decay.
        **hyperparameters: ``lr``.

    Returns:
        The optimizer.

    Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost", 2018.
    """
    # Here, not above: it imports bitsandbytes too, seconds that only Adafactor should pay.
    from transformers.optimization import Adafactor

    return Adafactor(groups, scale_parameter=False, relative_step=False, **hyperparameters)


def _can_fuse(name: str, groups: list[dict[str, Any]], fused_on: tuple[str, ...]) -> bool:
    """Whether one kernel can do the whole step; logs the choice."""
    devices = {kernels_of(parameter.device) for group in groups for parameter in group["params"]}
    if devices <= set(fused_on):
        logger.info("%s is fused: one pass over weights, gradients and state, no temporaries", name)
        return True
    logger.info("%s is not fused: it can be on %s, weights are on %s", name, fused_on, sorted(devices))
    return False
