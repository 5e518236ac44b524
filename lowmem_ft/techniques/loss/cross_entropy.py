"""Cross entropy of a chunk's logits, operation by operation.

Axes: C tokens of one chunk, V vocabulary, W vocabulary of one tile; a trailing 1 is an axis of length one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Head:
    """Operations on the logits of a head, and how much of them exists at once.

    Args:
        chunk_tokens: tokens whose logits exist at once.
        tile_rows: rows of the vocabulary whose logits exist at once.
        logit_softcap: c in ``c * tanh(logits / c)``, after the scale; None: no cap.
        logit_scale: factor on the logits.
        label_smoothing: share of each label that is spread over the whole vocabulary.
        loss_factor: factor on the summed loss.
    """

    chunk_tokens: int
    tile_rows: int
    logit_softcap: float | None
    logit_scale: float
    label_smoothing: float
    loss_factor: float | Tensor


class CrossEntropy:
    """Losses of tokens and their gradients, from logits of all of the vocabulary or of a tile, which they overwrite.

    Args:
        head: operations on the logits.
        vocabulary: tokens of the whole vocabulary.
        factor: factor on the gradient.
        dtype: type to compute in, float32 or float64.
    """

    def __init__(self, head: Head, vocabulary: int, factor: float | Tensor, dtype: torch.dtype) -> None:
        self._head, self._vocabulary, self._factor, self._dtype = head, vocabulary, factor, dtype

    def losses_(self, logits_CV: Tensor, labels_C: Tensor, *, gradient: bool) -> Tensor:
        """Return each token's loss (C x 1); with ``gradient``, overwrite the logits with it."""
        exact_CV, slope_CV = self._scaled_and_capped(logits_CV, with_slope=gradient)
        labels = _LabelsInTile.of(labels_C, 0, logits_CV.shape[1])
        seen = _Seen.of_(exact_CV, labels, with_sum=self._head.label_smoothing > 0)
        if gradient:
            self._finish_gradient_(logits_CV, exact_CV.div_(seen.sum_C1), slope_CV, labels)
        return seen.log_sum_C1 - self._target(seen)

    def statistics_(self, logits_CW: Tensor, labels_C: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return what the loss needs of a tile of logits.

        Args:
            logits_CW: the logits.
            labels_C: token ids.
            first: the token of the tile's first logit.

        Returns:
            For each token (C x 1) the logarithm of the sum of the exponentials, and what the smoothed label selects.
        """
        exact_CW, _ = self._scaled_and_capped(logits_CW, with_slope=False)
        labels = _LabelsInTile.of(labels_C, first, logits_CW.shape[1])
        seen = _Seen.of_(exact_CW, labels, with_sum=self._head.label_smoothing > 0)
        return seen.log_sum_C1, self._target(seen)

    def gradient_(self, logits_CW: Tensor, labels_C: Tensor, first: int, log_sum_C1: Tensor) -> None:
        """Overwrite a tile's logits with the loss's gradient; ``log_sum_C1`` is that of all tiles."""
        exact_CW, slope_CW = self._scaled_and_capped(logits_CW, with_slope=True)
        probability_CW = exact_CW.sub_(log_sum_C1).exp_()
        labels = _LabelsInTile.of(labels_C, first, logits_CW.shape[1])
        self._finish_gradient_(logits_CW, probability_CW, slope_CW, labels)

    def _scaled_and_capped(self, logits_CW: Tensor, *, with_slope: bool) -> tuple[Tensor, Tensor | None]:
        """Return the logits in fp32, scaled and capped, and the cap's slope; in place if the logits are fp32."""
        head = self._head
        exact_CW = logits_CW.to(self._dtype)
        if head.logit_scale != 1.0:
            exact_CW.mul_(head.logit_scale)
        if head.logit_softcap is None:
            return exact_CW, None
        exact_CW.div_(head.logit_softcap).tanh_()
        slope_CW = exact_CW.square().neg_().add_(1) if with_slope else None
        return exact_CW.mul_(head.logit_softcap), slope_CW

    def _target(self, seen: _Seen) -> Tensor:
        """Return what the smoothed label selects of each token's logits in a tile."""
        if seen.logit_sum_C1 is None:
            return seen.label_logit_C1
        smoothing = self._head.label_smoothing
        spread = smoothing / self._vocabulary
        return (1 - smoothing) * seen.label_logit_C1 + spread * seen.logit_sum_C1

    def _finish_gradient_(
        self, logits_CW: Tensor, probability_CW: Tensor, slope_CW: Tensor | None, labels: _LabelsInTile
    ) -> None:
        """Overwrite the logits with the loss's gradient with respect to them."""
        head = self._head
        label_probability_C1 = probability_CW.gather(1, labels.column_C1)
        label_share_C1 = labels.is_inside_C1.to(self._dtype) * (1 - head.label_smoothing)
        d_exact_CW = probability_CW.scatter_(1, labels.column_C1, label_probability_C1 - label_share_C1)
        if head.label_smoothing:
            d_exact_CW.sub_(head.label_smoothing / self._vocabulary)
        if slope_CW is not None:
            d_exact_CW.mul_(slope_CW)
        if head.logit_scale != 1.0:
            d_exact_CW.mul_(head.logit_scale)
        if isinstance(self._factor, Tensor) or self._factor != 1.0:
            d_exact_CW.mul_(self._factor)
        logits_CW.copy_(d_exact_CW)


@dataclass(frozen=True)
class _LabelsInTile:
    """Each token's label as a column of a tile; a label outside the tile is clamped to some column and masked."""

    column_C1: Tensor
    is_inside_C1: Tensor

    @classmethod
    def of(cls, labels_C: Tensor, first: int, width: int) -> _LabelsInTile:
        column_C1 = labels_C.unsqueeze(1) - first
        return cls(column_C1.clamp(0, width - 1), (column_C1 >= 0) & (column_C1 < width))


@dataclass(frozen=True)
class _Seen:
    """One tile's statistics for each token of a chunk, in fp32.

    Args:
        log_sum_C1: logarithm of the sum of the exponentials of the tile's logits.
        sum_C1: that sum, of the logits minus their maximum.
        label_logit_C1: the label's logit, 0 if it is not in the tile.
        logit_sum_C1: the sum of the logits, if requested.
    """

    log_sum_C1: Tensor
    sum_C1: Tensor
    label_logit_C1: Tensor
    logit_sum_C1: Tensor | None

    @classmethod
    def of_(cls, exact_CW: Tensor, labels: _LabelsInTile, *, with_sum: bool) -> _Seen:
        """Compute the statistics; overwrites the logits with the exponentials of the logits minus their maximum."""
        label_logit_C1 = exact_CW.gather(1, labels.column_C1).mul_(labels.is_inside_C1)
        logit_sum_C1 = exact_CW.sum(1, keepdim=True) if with_sum else None
        maximum_C1 = exact_CW.amax(1, keepdim=True)
        sum_C1 = exact_CW.sub_(maximum_C1).exp_().sum(1, keepdim=True)
        return cls(sum_C1.log().add_(maximum_C1), sum_C1, label_logit_C1, logit_sum_C1)
