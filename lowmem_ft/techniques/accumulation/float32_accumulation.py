"""Sums of 16-bit gradients in float32."""

from __future__ import annotations

import logging
from typing import Any

import torch

from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_float32_accumulation"]

log = logging.getLogger(__name__)


class Float32Accumulation(Technique):
    """Float32 sums that are enabled, with or without 16-bit weights; see :func:`enable_float32_accumulation`."""


def enable_float32_accumulation(
    optimizer: torch.optim.Optimizer, *, takes_float32: bool
) -> Float32Accumulation:
    """Make autograd sum the gradients of 16-bit weights in float32: it rounds each micro-batch's gradient, not the sum.

    Frees: nothing; 4 bytes a weight instead of 2 while its gradient is summed.
    Costs: those 2 bytes: for all weights in horizontal order, for one layer in vertical order.
    Equals: the gradients in float32 of the same 16-bit products. In bfloat16 a sum of 16 micro-batches would drop terms
    smaller than 1/256 of it.
    Limits: ``DistributedDataParallel`` does not accept such gradients. Runs of several processes do without this
    technique (``training/processes/gradient_averaging.py``).
    Source: ``Tensor.grad_dtype`` of torch 2.11.

    Args:
        optimizer: the owner of the parameters; their gradients must be None.
        takes_float32: whether it takes gradients of another type than the weights'. If not, they are rounded before
            each step, one after the other, and freed after it.

    Returns:
        A handle whose ``remove()`` makes the weights' type the gradients' again.
    """
    parameters = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.dtype.itemsize < 4
    ]
    if not parameters:
        return Float32Accumulation()

    def begin(*_: Any) -> None:
        for parameter in parameters:
            parameter.grad = None  # left over from the previous step
            parameter.grad_dtype = torch.float32

    def end(*_: Any) -> None:
        for parameter in parameters:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = parameter.dtype
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)

    begin()
    log.info(
        "Accumulation: gradients of %d bfloat16 tensors are summed in float32 (accumulation.dtype).",
        len(parameters),
    )
    if takes_float32:
        return Float32Accumulation(end)
    before, after = optimizer.register_step_pre_hook(end), optimizer.register_step_post_hook(begin)
    return Float32Accumulation(end, before.remove, after.remove)
