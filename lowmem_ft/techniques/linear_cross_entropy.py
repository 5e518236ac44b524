"""Cross-entropy of a linear head, chunk by chunk: the logits of some tokens, their loss, their gradients, next chunk.

Chunking alone frees nothing, because autograd keeps every chunk's logits for backward. Here the gradients are made in
the same pass as the loss, so nothing else is kept and nothing is computed twice.

Axes: N tokens, C tokens of one chunk, H hidden size, V vocabulary; a trailing 1 is an axis of length one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_ROWS_AT_ONCE = 8192
"""Rows of a gradient that pass through a temporary of another type together, so that the temporary stays small."""


def linear_cross_entropy_sum(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    chunk_tokens: int,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
) -> Tensor:
    """The sum over tokens of the negative log-likelihood, without the logits of more than ``chunk_tokens`` tokens.

    Frees: every N x V array (logits, their fp32 copy, probabilities, gradient). Kept for backward are the gradients
    themselves, N x H and V x H; a frozen weight or input has none.
    Costs: no recomputation. While a chunk is worked on, 6 bytes * C * V in half precision or 4 in fp32, and 4 more
    with a softcap. With half-precision products and several chunks, the weight's gradient is summed in an fp32 buffer
    of 4 * V * H bytes that lives until backward; for an fp32 weight this buffer is the gradient.
    Equals: ``F.cross_entropy(softcap(scale * F.linear(hidden, weight, bias)).float(), labels, reduction="sum")`` with
    matrix products in autocast's type, or else the inputs', and all else in fp32.
    Limits: no second derivative, and one call of backward, which hands its buffers over as the gradients.
    Source: Liger Kernel, 2024 (arXiv:2410.10989), for gradients made in forward; it sums them in the weight's type.

    Args:
        hidden_NH: the head's input, one row for each token that has a label.
        weight_VH: the head's weight.
        labels_N: int64 token ids, each in [0, V).
        bias_V: the head's bias, if it has one.
        chunk_tokens: tokens whose logits exist at once.
        logit_softcap: c in ``c * tanh(logits / c)``, after the scale; None leaves the logits as they are.
        logit_scale: factor on the logits.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs), connected to the graph even if N is 0.
    """
    head = _Head(
        chunk_tokens=chunk_tokens,
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
        # The Function cannot know: in its forward grad mode is always off, and it is told what requires grad, not
        # whether anybody wants it.
        grad_enabled=torch.is_grad_enabled(),
    )
    return _LinearCrossEntropySum.apply(hidden_NH, weight_VH, bias_V, labels_N, head)


@dataclass(frozen=True, kw_only=True)
class _Head:
    chunk_tokens: int
    logit_softcap: float | None
    logit_scale: float
    grad_enabled: bool


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, labels_N: Tensor, head: _Head
    ) -> Tensor:
        needs_hidden, needs_weight, needs_bias = (
            needed and head.grad_enabled for needed in ctx.needs_input_grad[:3]
        )
        compute_dtype = _compute_dtype(hidden_NH)
        exact_dtype = torch.promote_types(compute_dtype, torch.float32)
        one_chunk = len(labels_N) <= head.chunk_tokens
        ctx.dtypes = [
            tensor.dtype if tensor is not None else None for tensor in (hidden_NH, weight_VH, bias_V)
        ]

        loss = torch.zeros((), dtype=exact_dtype, device=hidden_NH.device)
        d_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        sum_dtype = compute_dtype if one_chunk else exact_dtype
        d_weight_VH = torch.zeros_like(weight_VH, dtype=sum_dtype) if needs_weight else None
        d_bias_V = torch.zeros_like(weight_VH[:, 0], dtype=exact_dtype) if needs_bias else None

        with _without_autocast(hidden_NH.device.type):
            weight_VH = weight_VH.to(compute_dtype)
            bias_V = bias_V.to(compute_dtype) if bias_V is not None else None
            for start in range(0, len(labels_N), head.chunk_tokens):
                rows = slice(start, start + head.chunk_tokens)
                hidden_CH = hidden_NH[rows].to(compute_dtype)
                logits_CV = F.linear(hidden_CH, weight_VH, bias_V)
                loss += _loss_sum_and_gradient_(
                    logits_CV, labels_N[rows], head, needs_hidden or needs_weight or needs_bias
                )
                d_logits_CV = logits_CV
                if d_hidden_NH is not None:
                    d_hidden_NH[rows] = d_logits_CV @ weight_VH
                if d_weight_VH is not None:
                    _add_product_(d_weight_VH, d_logits_CV, hidden_CH)
                if d_bias_V is not None:
                    d_bias_V += d_logits_CV.sum(0, dtype=exact_dtype)
                del logits_CV, d_logits_CV  # else this chunk's logits live while the next chunk's are made
        ctx.gradients = [d_hidden_NH, d_weight_VH, d_bias_V]
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError(
                "The chunked loss handed its gradients over in the first backward; run forward again."
            )
        # Taken off ctx, so that autograd is their only owner and makes them the parameters' .grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [
            _scaled(gradient, d_loss, dtype) if gradient is not None and dtype is not None else None
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None)


def _compute_dtype(hidden_NH: Tensor) -> torch.dtype:
    device_type = hidden_NH.device.type
    return (
        torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else hidden_NH.dtype
    )


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Casts are made by hand, once: autocast would make them for each chunk, or cache a copy of the weight."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _loss_sum_and_gradient_(logits_CV: Tensor, labels_C: Tensor, head: _Head, needs_gradient: bool) -> Tensor:
    """The chunk's summed loss in fp32; overwrites the logits with the loss's gradient by them (or with anything)."""
    exact_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if head.logit_scale != 1.0:
        exact_CV.mul_(head.logit_scale)
    slope_CV = None
    if head.logit_softcap is not None:
        exact_CV.div_(head.logit_softcap).tanh_()
        slope_CV = exact_CV.square().neg_().add_(1) if needs_gradient else None
        exact_CV.mul_(head.logit_softcap)

    labels_C1 = labels_C.unsqueeze(1)
    exact_CV.sub_(exact_CV.amax(1, keepdim=True))
    label_logit_C1 = exact_CV.gather(1, labels_C1)
    sum_C1 = exact_CV.exp_().sum(1, keepdim=True)
    loss = (sum_C1.log() - label_logit_C1).sum()
    if not needs_gradient:
        return loss

    probability_CV = exact_CV.div_(sum_C1)
    d_exact_CV = probability_CV.scatter_(1, labels_C1, label_logit_C1.exp_().div_(sum_C1).sub_(1))
    if slope_CV is not None:
        d_exact_CV.mul_(slope_CV)
    if head.logit_scale != 1.0:
        d_exact_CV.mul_(head.logit_scale)
    logits_CV.copy_(d_exact_CV)
    return loss


def _add_product_(d_weight_VH: Tensor, d_logits_CV: Tensor, hidden_CH: Tensor) -> None:
    """Adds this chunk's share of the weight's gradient."""
    if d_weight_VH.dtype == hidden_CH.dtype:
        d_weight_VH.addmm_(d_logits_CV.t(), hidden_CH)
        return
    for rows in _row_slices(d_weight_VH):
        d_weight_VH[rows] += d_logits_CV[:, rows].t() @ hidden_CH


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient times a scalar: multiplied in fp32, then cast; in the gradient's own memory if the type stays.

    An fp16 loss scale may be beyond fp16, and a factor such as 1 / tokens has more digits than bf16.
    """
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    factor_1 = factor.reshape(1)  # CUDA rounds a 0-d factor to the gradient's type before the product
    for rows in _row_slices(gradient):
        result[rows] = gradient[rows] * factor_1
    return result


def _row_slices(tensor: Tensor) -> Iterator[slice]:
    return (slice(start, start + _ROWS_AT_ONCE) for start in range(0, len(tensor), _ROWS_AT_ONCE))
