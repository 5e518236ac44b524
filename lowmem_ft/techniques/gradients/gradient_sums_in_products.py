"""Gradients of linear layers' 16-bit weights, added to a float32 sum by the product that computes them.

Axes: N tokens, O outputs of the layer, I inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from lowmem_ft.foundation.devices import kernels_of


def add_product_(sum_OI: Tensor, d_output_NO: Tensor, input_NI: Tensor) -> None:
    """Add ``d_output.T @ input`` to a float32 sum, without rounding the product to the type of its 16-bit factors.

    On CUDA cuBLAS multiplies 16-bit factors and adds in float32; elsewhere the factors are converted first.
    Source: pytorch, aten/src/ATen/native/cuda/Blas.cpp, _addmm_dtype_out_cuda.
    """
    if kernels_of(sum_OI.device) == "cuda":
        torch.addmm(sum_OI, d_output_NO.t(), input_NI, out_dtype=sum_OI.dtype, out=sum_OI)
    else:
        sum_OI.addmm_(d_output_NO.t().to(sum_OI.dtype), input_NI.to(sum_OI.dtype))


def float32_sum_of(weight: Tensor) -> Tensor:
    """Return a weight's ``.grad``, which sums in float32; zeros at first."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight, dtype=torch.float32)
    return weight.grad


class SummingLinear:
    """Replacement for a linear layer's forward whose backward adds to its weight's ``.grad`` itself.

    Autograd gets no gradient of the weight, and calls the hooks on it nevertheless, once each use in this backward pass
    has been differentiated: the weight is an input of the first node, so that its turn comes last.
    """

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear

    def __call__(self, input: Tensor) -> Tensor:
        """Return what the layer returns."""
        weight, bias = self._linear.weight, self._linear.bias
        if not (torch.is_grad_enabled() and weight.requires_grad):
            return F.linear(input, weight, bias)
        kept = _Kept()
        same = _Keep.apply(input, weight, kept)
        return _Sum.apply(F.linear(same, weight.detach(), bias), _Unseen(weight), kept)


class _Kept:
    """The node whose saved tensor is the layer's input."""

    saver: Any = None


class _Unseen:
    """A weight that autograd does not see among a node's inputs."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight


class _Keep(torch.autograd.Function):
    """Saves a linear layer's input before its product, where recomputation of a checkpointed layer may stop."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, kept: _Kept) -> Tensor:
        ctx.save_for_backward(input)
        kept.saver = ctx
        return input.view_as(input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_input: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (d_input if ctx.needs_input_grad[0] else None), None, None


class _Sum(torch.autograd.Function):
    """Passes a linear layer's output on; its backward adds the product to the weight's sum."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, unseen: _Unseen, kept: _Kept) -> Tensor:
        ctx.mark_dirty(output)  # else it would be a view, which models could not change in place
        ctx.weight, ctx.kept = unseen.weight, kept
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (input,) = ctx.kept.saver.saved_tensors
        input_NI = input.flatten(0, -2).to(d_output.dtype)  # as autocast did
        add_product_(float32_sum_of(ctx.weight), d_output.flatten(0, -2), input_NI)
        return d_output, None, None
