"""Gradients of linear layers' 16-bit weights, added to their sums by the product that computes them.

Axes: N tokens, O outputs of the layer, I inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lowmem_ft.foundation.devices import kernels_of
from lowmem_ft.techniques.modules.once_differentiable import once_differentiable
from lowmem_ft.techniques.modules.save_before_compute import (
    SavedTensors,
    is_inside_hooks,
    not_as_view,
    save_early,
)


def add_product_(sum_OI: Tensor, d_output_NO: Tensor, input_NI: Tensor) -> None:
    """Add ``d_output.T @ input`` to a sum in float32 or in the type of its 16-bit factors; the product is not rounded.

    On CUDA cuBLAS multiplies 16-bit factors and adds in float32; elsewhere the factors are converted first. A 16-bit
    sum is rounded once, after the addition.
    Source: pytorch, aten/src/ATen/native/cuda/Blas.cpp, _addmm_dtype_out_cuda.
    """
    if kernels_of(sum_OI.device) != "cuda":
        sum_OI.copy_(sum_OI.float().addmm_(d_output_NO.t().float(), input_NI.float()))
    elif sum_OI.dtype == input_NI.dtype:
        sum_OI.addmm_(d_output_NO.t(), input_NI)
    else:
        torch.addmm(sum_OI, d_output_NO.t(), input_NI, out_dtype=sum_OI.dtype, out=sum_OI)


def _add_product_to_grad(weight_OI: Tensor, d_output_NO: Tensor, input_NI: Tensor) -> None:
    """Add ``d_output.T @ input`` to a weight's ``.grad``, in the type that it sums in."""
    if weight_OI.grad is None and weight_OI.grad_dtype == input_NI.dtype:
        weight_OI.grad = d_output_NO.t() @ input_NI  # without zeros to write and read
    else:
        add_product_(sum_in_grad(weight_OI), d_output_NO, input_NI)


def sum_in_grad(weight: Tensor) -> Tensor:
    """Return a weight's ``.grad``, in the type that it sums in; zeros at first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=weight.grad_dtype)
    return weight.grad


class SummingLinear:
    """Replacement for a linear layer's forward whose backward adds to its weight's ``.grad`` itself.

    Autograd gets no gradient of the weight, and calls the hooks on it nevertheless, once each use in this backward pass
    has been differentiated. It is one node of autograd: each costs the host as much as several operators.

    Args:
        linear: the layer.
        is_last: whether its decoder layer has no such layer after it, so that recomputation may stop before it.
    """

    def __init__(self, linear: nn.Linear, *, is_last: bool) -> None:
        self._linear = linear
        self._is_last = is_last

    def __call__(self, input: Tensor) -> Tensor:
        """Return what the layer returns."""
        weight, bias = self._linear.weight, self._linear.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(input, weight, bias)
        saved, of_input = None, input.requires_grad
        if self._is_last and is_inside_hooks():
            input, saved = save_early(input, weight)
        return _Sum.apply(input, weight, bias, saved, of_input)


class _Sum(torch.autograd.Function):
    """A linear layer; its backward adds the product to the weight's sum."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        saved: SavedTensors | None,
        of_input: bool,
    ) -> Tensor:
        ctx.weight, ctx.saved, ctx.of_input = weight, saved, of_input
        if saved is None:
            ctx.save_for_backward(input, weight)
        return not_as_view(F.linear(input, weight, bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        input, weight = (ctx.saved or ctx).saved_tensors
        d_output_NO = d_output.flatten(0, -2)
        input_NI = input.flatten(0, -2).to(d_output.dtype)  # as autocast did
        _add_product_to_grad(ctx.weight, d_output_NO, input_NI)
        d_input = (
            (d_output_NO @ weight.to(d_output.dtype)).view(input.shape).to(input.dtype)
            if ctx.of_input
            else None
        )
        d_bias = d_output_NO.sum(0) if ctx.needs_input_grad[2] else None
        return d_input, None, d_bias, None, None
