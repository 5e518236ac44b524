"""Cross entropy of a chunk's logits by one launch of the Triton kernel, where that works.

Axes: C tokens of one chunk, V vocabulary, W vocabulary of one tile; a trailing 1 is an axis of length one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.tensors.own_operators import register_operator
from lowmem_ft.foundation.tensors.triton_use import Kernel, Work, launching_on, uses_kernel
from lowmem_ft.techniques.loss import triton as with_kernel  # its names import the library when they are used
from lowmem_ft.techniques.loss.cross_entropy import CrossEntropy, Head

_WORK = Work("cross entropy", "The loss is computed by many small kernels")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_VECTOR = 16
"""Columns are read in vectors up to the end of a row if their number is a multiple of this one."""


class CrossEntropyInTriton:
    """The work of :class:`CrossEntropy` by a kernel that reads the logits twice and writes their gradient over them.

    Frees: the float32 copy of the logits, 4 bytes * C * W of 6 in half precision, and the softcap's slope.
    Saves time: it moves 6 bytes a logit in half precision, where the operations move 54, and launches one kernel.
    Equals: the operations to float32's rounding; a half-precision gradient is rounded once, as theirs is.
    Limits: NVIDIA, compute capability 8.0; no float64.
    Source: Online normalizer calculation for softmax, 2018 (arXiv:1805.02867).

    Args:
        head: operations on the logits.
        vocabulary: tokens of the whole vocabulary.
        factor: factor on the gradient.
    """

    def __init__(self, head: Head, vocabulary: int, factor: float | Tensor) -> None:
        self._head, self._vocabulary, self._factor = head, vocabulary, factor

    def losses_(self, logits_CV: Tensor, labels_C: Tensor, *, gradient: bool) -> Tensor:
        """Return each token's loss (C x 1); with ``gradient``, overwrite the logits with it."""
        log_sum_C1, target_C1 = self._statistics_(logits_CV, labels_C, 0, gradient=gradient)
        return log_sum_C1 - target_C1

    def statistics_(self, logits_CW: Tensor, labels_C: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return what the loss needs of a tile that begins at row ``first`` of the vocabulary."""
        return self._statistics_(logits_CW, labels_C, first, gradient=False)

    def gradient_(self, logits_CW: Tensor, labels_C: Tensor, first: int, log_sum_C1: Tensor) -> None:
        """Overwrite a tile's logits with the loss's gradient with respect to them."""
        self._launch(logits_CW, labels_C, first, log_sum_C1, None, gradient=True)

    def _statistics_(
        self, logits_CW: Tensor, labels_C: Tensor, first: int, *, gradient: bool
    ) -> tuple[Tensor, Tensor]:
        log_sum_C1, target_C1 = torch.empty(2, len(labels_C), 1, device=logits_CW.device)
        self._launch(logits_CW, labels_C, first, log_sum_C1, target_C1, gradient=gradient)
        return log_sum_C1, target_C1

    def _launch(
        self,
        logits_CW: Tensor,
        labels_C: Tensor,
        first: int,
        log_sum_C1: Tensor,
        target_C1: Tensor | None,
        *,
        gradient: bool,
    ) -> None:
        factor, on_device = self._factor, None
        if isinstance(factor, Tensor):
            is_here = factor.device == logits_CW.device
            factor, on_device = (1.0, factor) if is_here else (float(factor), None)
        head = self._head
        _cross_entropy_in_triton(
            logits_CW,
            labels_C.contiguous(),
            log_sum_C1,
            target_C1,
            gradient,
            on_device,
            factor,
            head.logit_scale,
            head.logit_softcap,
            head.label_smoothing,
            self._vocabulary,
            first,
        )


def cross_entropy_of(
    head: Head,
    vocabulary: int,
    factor: float | Tensor,
    *,
    compute_dtype: torch.dtype,
    device: torch.device,
    kernel: Kernel,
) -> CrossEntropy | CrossEntropyInTriton:
    """Return the fastest way to compute cross entropy that works on a device.

    Args:
        head: operations on the logits.
        vocabulary: tokens of the whole vocabulary.
        factor: factor on the gradient.
        compute_dtype: type of the logits; float64 is computed operation by operation.
        device: the device that they are on.
        kernel: ``auto`` takes the kernel on CUDA if it is available and agrees with the operations; see
            ``triton_use``.

    Raises:
        UserError: if the kernel is required and does not work.
        RuntimeError: if the trial runs out of memory.
    """
    in_tiles, in_vectors = head.tile_rows < vocabulary, vocabulary % _VECTOR == 0
    compiled_for = (
        compute_dtype,
        in_tiles,
        in_vectors,
        head.logit_softcap is not None,
        head.label_smoothing > 0,
        isinstance(factor, Tensor),
    )
    trial = partial(_trial, head, factor, compute_dtype, device, in_tiles, in_vectors)
    if compute_dtype in _DTYPES and uses_kernel(_WORK, kernel, device, compiled_for, trial):
        return CrossEntropyInTriton(head, vocabulary, factor)
    return CrossEntropy(head, vocabulary, factor, torch.promote_types(compute_dtype, torch.float32))


def _trial(
    head: Head,
    factor: float | Tensor,
    dtype: torch.dtype,
    device: torch.device,
    in_tiles: bool,
    in_vectors: bool,
    kernel: Kernel,
) -> dict[str, Tensor]:
    """Return losses and gradients of a few rows, whole or in two tiles, each of a block and a part of one."""
    cut = with_kernel.BLOCK + 4 * _VECTOR
    width = 2 * cut + (0 if in_vectors else 3)
    labels_C = torch.tensor([0, 1, cut - 1, cut, width - 1], device=device)
    values_CV = torch.randn(len(labels_C), width, generator=torch.Generator().manual_seed(0))
    # Where a cap is flat, its slope is a difference that float32 does not resolve.
    size = 4.0 if head.logit_softcap is None else min(4.0, head.logit_softcap / 4)
    logits_CV = (values_CV * (size / head.logit_scale)).to(device, dtype)
    if kernel == "eager":
        entropy = CrossEntropy(head, width, factor, torch.float32)
    else:
        entropy = CrossEntropyInTriton(head, width, factor)
    if not in_tiles:
        loss_C1 = entropy.losses_(logits_CV, labels_C, gradient=True)
        return {"loss": loss_C1, "gradient": logits_CV.float()}
    tiles = {first: logits_CV[:, first : first + width - cut] for first in (0, cut)}
    seen = [entropy.statistics_(tile.clone(), labels_C, first) for first, tile in tiles.items()]
    log_sum_C1 = torch.logaddexp(seen[0][0], seen[1][0])
    for first, tile in tiles.items():
        entropy.gradient_(tile, labels_C, first, log_sum_C1)
    return {"loss": log_sum_C1 - seen[0][1] - seen[1][1], "gradient": logits_CV.float()}


def cross_entropy_in_triton(
    logits_CW: Tensor,
    labels_C: Tensor,
    log_sum_C1: Tensor,
    target_C1: Tensor | None,
    gradient: bool,
    factor_on_device: Tensor | None,
    factor: float,
    logit_scale: float,
    logit_softcap: float | None,
    label_smoothing: float,
    vocabulary: int,
    first: int,
) -> None:
    """Launch the kernel, as an operator: a trace, without Triton and values, sees what it reads and writes.

    Args:
        logits_CW: each row contiguous; overwritten with the gradient, if that is wanted.
        labels_C: int64 token ids, contiguous.
        log_sum_C1: logarithm of the sum of the exponentials of all logits of a token; written with ``target_C1``.
        target_C1: what the smoothed label selects of a token's logits, written; None: ``log_sum_C1`` is read.
        gradient: whether to compute it.
        factor_on_device: factor on the gradient, of one element; None: 1.
        factor: another factor on it.
        logit_scale: as in :class:`Head`, and so are the next two.
        logit_softcap: see there.
        label_smoothing: see there.
        vocabulary: tokens of the whole vocabulary.
        first: the token of the first column.
    """
    assert logits_CW.stride(1) == 1, "a row of logits is contiguous"
    kernel: Any = with_kernel.cross_entropy_row
    with launching_on(logits_CW.device):
        kernel[(len(logits_CW),)](
            logits_CW,
            logits_CW.stride(0),
            logits_CW.shape[1],
            labels_C,
            first,
            log_sum_C1,
            log_sum_C1 if target_C1 is None else target_C1,
            log_sum_C1 if factor_on_device is None else factor_on_device,
            factor,
            logit_scale,
            1.0 if logit_softcap is None else logit_softcap,
            1 - label_smoothing,
            label_smoothing / vocabulary,
            CAPS=logit_softcap is not None,
            SMOOTHS=label_smoothing > 0,
            HAS_FACTOR=factor_on_device is not None,
            WITH_STATISTICS=target_C1 is not None,
            WITH_GRADIENT=gradient,
            BLOCK=with_kernel.BLOCK,
            **with_kernel.OPTIONS,
        )


def _moved_bytes(
    logits_CW: Tensor,
    labels_C: Tensor,
    log_sum_C1: Tensor,
    target_C1: Tensor | None,
    gradient: bool,
    *others: object,
) -> int:
    """Return the bytes moved: logits are read for the statistics, and read and written for the gradient."""
    passes = (target_C1 is not None) + 2 * gradient
    written = 0 if target_C1 is None else target_C1.nbytes
    return passes * logits_CW.nbytes + labels_C.nbytes + log_sum_C1.nbytes + written


_cross_entropy_in_triton = register_operator(
    cross_entropy_in_triton,
    "(Tensor(a!) logits, Tensor labels, Tensor(b!) log_sum, Tensor(c!)? target, bool gradient, "
    "Tensor? factor_on_device, float factor, float logit_scale, float? logit_softcap, float label_smoothing, "
    "int vocabulary, int first) -> ()",
    lambda *arguments: None,
    moved_bytes=_moved_bytes,
    irrelevant=("factor", "logit_scale", "logit_softcap", "label_smoothing", "vocabulary", "first"),
    launched_by_triton=True,
)
