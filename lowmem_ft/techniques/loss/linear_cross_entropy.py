"""Cross-entropy of a linear head, chunk by chunk: the logits of some tokens, their loss, their gradients, next chunk.

Chunking alone frees nothing, because autograd keeps every chunk's logits for backward. Here the gradients are computed
in the same pass as the loss, so nothing else is kept. With the vocabulary in tiles there are two passes, one for the
loss and one for the gradients, because a token's probabilities are known only after all tiles.

Axes: N tokens, C tokens of one chunk, H hidden size, V vocabulary, R its trained rows, W vocabulary of one tile; a
trailing 1 is an axis of length one.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lowmem_ft.foundation.tensors.autocast_dtype import autocast_dtype
from lowmem_ft.foundation.tensors.gradient_blocks import rows_per_block
from lowmem_ft.foundation.tensors.triton_use import Kernel
from lowmem_ft.techniques.adapters.trained_rows import TrainedRows
from lowmem_ft.techniques.gradients.weight_gradient import row_slices
from lowmem_ft.techniques.loss.cross_entropy import Head
from lowmem_ft.techniques.loss.cross_entropy_passes import HeadLoss, WantedGradients
from lowmem_ft.techniques.loss.head_tiles import HeadTiles, ResidentTiles


def linear_cross_entropy_sum(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    labels_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    chunk_tokens: int,
    vocabulary_tiles: int = 1,
    logit_softcap: float | None = None,
    logit_scale: float = 1.0,
    label_smoothing: float = 0.0,
    loss_factor: float | Tensor = 1.0,
    head_tiles: HeadTiles | None = None,
    sums_in_product: bool = False,
    trained_rows: TrainedRows | None = None,
    kernel: Kernel = "auto",
) -> Tensor:
    """Return the summed negative log-likelihood, never holding the logits of more than ``chunk_tokens`` tokens.

    Frees: every N x V array (logits, their fp32 copy, probabilities, gradient). Kept for backward are the gradients
    themselves, N x H and V x H; a frozen weight or input needs none.
    Costs: with one tile no recomputation; with several, the logits are computed twice. During a chunk, 2 bytes * C * W
    in half precision or 4 in fp32 with the Triton kernel (:class:`CrossEntropyInTriton`); without it 6 or 4, and 4 more
    with a softcap. With a half-precision weight also 2 * N * W bytes, or if
    that is less, 4 * W * H (see :class:`WeightGradient`), and 4 * N * H with several tiles.
    Equals: ``F.cross_entropy(softcap(scale * F.linear(hidden, weight, bias)).float(), labels, reduction="sum",
    label_smoothing=label_smoothing) * loss_factor`` with matrix products in autocast's type, or else the inputs', and
    all else in fp32.
    Limits: no second derivative, and only one call of backward, which returns its buffers as the gradients.
    Source: Liger Kernel, 2024 (arXiv:2410.10989), for gradients computed in forward; it sums them in the weight's type.
    Online normalizer calculation for softmax, 2018 (arXiv:1805.02867), for the tiles.

    Args:
        hidden_NH: the head's input, one row for each token that has a label.
        weight_VH: the head's weight. With ``head_tiles`` only its shape, type and ``requires_grad`` are read.
        labels_N: int64 token ids, each in [0, V).
        bias_V: the head's bias, if it has one.
        chunk_tokens: tokens whose logits exist at once.
        vocabulary_tiles: number of tiles of the vocabulary; fewer if one would be less than a block
            (:func:`rows_per_block`).
        logit_softcap: c in ``c * tanh(logits / c)``, after the scale; None leaves the logits as they are.
        logit_scale: factor on the logits.
        label_smoothing: share of each label that is spread over the whole vocabulary, 0 to 1.
        loss_factor: factor on the sum. A half-precision gradient is rounded after it, so passing it here is more exact
            than multiplying outside.
        head_tiles: supplies the weight and takes its gradient while forward runs, so that the factor on the result must
            be 1: pass it as ``loss_factor``. None: the weight is on the device, and its gradient goes through autograd.
        sums_in_product: whether the products add to the weight's float32 ``.grad`` while forward runs; the factor on
            the result must be 1 then, too. Not with ``head_tiles``.
        trained_rows: the only rows of a frozen weight that get a gradient. Not with ``head_tiles``.
        kernel: ``auto`` takes the Triton kernel on CUDA if it works there; ``eager`` never, ``triton`` requires it.

    Returns:
        A scalar in fp32 (fp64 for fp64 inputs), connected to the graph even if N is 0.
    """
    head = Head(
        chunk_tokens=chunk_tokens,
        tile_rows=_tile_rows(weight_VH, vocabulary_tiles),
        logit_softcap=logit_softcap,
        logit_scale=logit_scale,
        label_smoothing=label_smoothing,
        loss_factor=loss_factor,
    )
    # The Function cannot know: in its forward grad mode is always off, and needs_input_grad shows what requires grad,
    # not whether a gradient is wanted.
    wanted = WantedGradients(
        hidden=torch.is_grad_enabled() and hidden_NH.requires_grad,
        weight=torch.is_grad_enabled() and (weight_VH.requires_grad or trained_rows is not None),
        bias=torch.is_grad_enabled() and bias_V is not None and bias_V.requires_grad,
        weight_rows=None if trained_rows is None else trained_rows.rows,
    )
    assert trained_rows is None or head_tiles is None, "rows of a weight that is elsewhere are not trained"
    rows_RH = None if trained_rows is None else trained_rows.parameter_RH
    served = None if head_tiles is None else _Served(weight_VH, head_tiles)
    resident_VH = weight_VH if served is None else None
    sums = sums_in_product and served is None
    return _LinearCrossEntropySum.apply(
        hidden_NH, resident_VH, bias_V, rows_RH, labels_N, head, wanted, served, sums, kernel
    )


def _tile_rows(weight_VH: Tensor, vocabulary_tiles: int) -> int:
    """Return a tile's rows, whether or not the weight's gradient is taken tile by tile, so that the loss is equal."""
    unit = rows_per_block(weight_VH.shape[1])
    return -(-len(weight_VH) // (vocabulary_tiles * unit)) * unit


@dataclass(frozen=True)
class _Served:
    """A weight that ``head_tiles`` supplies."""

    weight_VH: Tensor
    tiles: HeadTiles


class _LinearCrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor | None,
        bias_V: Tensor | None,
        rows_RH: Tensor | None,
        labels_N: Tensor,
        head: Head,
        wanted: WantedGradients,
        served: _Served | None,
        sums: bool,
        kernel: Kernel,
    ) -> Tensor:
        if served is not None:
            weight_VH, tiles = served.weight_VH, served.tiles
        else:
            assert weight_VH is not None
            tiles = ResidentTiles(weight_VH, sums=sums, trained_rows=wanted.weight_rows)
        work = HeadLoss(
            hidden_NH,
            weight_VH,
            bias_V,
            labels_N,
            head=head,
            tiles=tiles,
            wanted=wanted,
            compute_dtype=autocast_dtype(hidden_NH) or hidden_NH.dtype,
            kernel=kernel,
        )
        with _without_autocast(hidden_NH.device.type):
            loss = work.in_one_pass() if head.tile_rows >= len(weight_VH) else work.in_two_passes()
        d_weight_VH = tiles.d_weight_VH if isinstance(tiles, ResidentTiles) else None
        of_weight = (d_weight_VH, None) if rows_RH is None else (None, d_weight_VH)
        ctx.gradients = [work.d_hidden_NH, of_weight[0], work.d_bias_V, of_weight[1]]
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden_NH, weight_VH, bias_V, rows_RH)]
        ctx.late_factor = work.late_factor
        ctx.is_weight_gradient_gone = (served is not None or sums) and wanted.weight
        return loss * head.loss_factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.gradients is None:
            raise RuntimeError(
                "The chunked loss passed on its gradients in the first backward pass; run the forward pass again."
            )
        if ctx.is_weight_gradient_gone:
            torch._assert_async(
                d_loss == 1,
                "the gradient of a head on the host, or summed in its product, is that of an unscaled loss",
            )
        # Taken off ctx, so that autograd is their only owner and uses them as the parameters' .grad without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        factor = d_loss * ctx.late_factor
        scaled = [
            _scaled(gradient, factor, dtype) if gradient is not None and dtype is not None else None
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, *[None] * 6)


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Turn autocast off: casts here are explicit, once; autocast would cast each chunk, or cache a weight copy."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient times a scalar: multiplied in fp32 and rounded once; in place if the type stays.

    An fp16 loss scale may be beyond fp16, and a factor such as 1 / tokens has more digits than bf16.
    """
    result = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    factor_1 = factor.reshape(1)  # CUDA rounds a 0-d factor to the gradient's type before the product
    for rows in row_slices(gradient):  # a CPU's copy in fp32 stays small
        torch.mul(gradient[rows], factor_1, out=result[rows])
    return result
