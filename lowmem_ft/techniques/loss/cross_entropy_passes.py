"""The loss of a linear head and its gradients, in one pass over the tokens or in two over tiles of the vocabulary.

Axes: N tokens, C tokens of one chunk, H hidden size, V vocabulary, W vocabulary of one tile; a trailing 1 is an axis of
length one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowmem_ft.foundation.repetition import rounds
from lowmem_ft.foundation.tensors.triton_use import Kernel
from lowmem_ft.techniques.gradients.weight_gradient import WeightGradient
from lowmem_ft.techniques.loss.cross_entropy import Head
from lowmem_ft.techniques.loss.cross_entropy_in_triton import cross_entropy_of
from lowmem_ft.techniques.loss.head_tiles import HeadTiles


@dataclass(frozen=True, kw_only=True)
class WantedGradients:
    """The gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool
    weight_rows: range | None = None
    """Rows of the weight whose gradient is wanted; None: all."""

    def rows_in(self, tile: slice) -> slice:
        """Return those of a tile's rows whose gradient is wanted, none of them if start and stop are equal."""
        if self.weight_rows is None:
            return tile
        start = min(max(tile.start, self.weight_rows.start), tile.stop)
        return slice(start, max(start, min(tile.stop, self.weight_rows.stop)))

    @property
    def any(self) -> bool:
        """True if any gradient is wanted."""
        return self.hidden or self.weight or self.bias


class HeadLoss:
    """The summed loss of one batch, before ``loss_factor``, and its gradients.

    Args:
        hidden_NH: the head's input.
        weight_VH: the head's weight, or a tensor of its shape and type.
        bias_V: the head's bias, if it has one.
        labels_N: token ids.
        head: operations on the logits.
        tiles: supplies the weight and takes its gradient.
        wanted: the gradients to compute.
        compute_dtype: type of matrix products.
        kernel: the way to compute cross entropy; see :func:`cross_entropy_of`.

    Attributes:
        d_hidden_NH: gradient of the input, times ``loss_factor`` unless that is ``late_factor``.
        d_bias_V: likewise for the bias, in fp32.
        late_factor: factor by which the gradients are still to be multiplied.
    """

    def __init__(
        self,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        *,
        head: Head,
        tiles: HeadTiles,
        wanted: WantedGradients,
        compute_dtype: torch.dtype,
        kernel: Kernel,
    ) -> None:
        self._hidden_NH, self._bias_V, self._labels_N = hidden_NH, bias_V, labels_N
        self._weight_VH = weight_VH
        self._head, self._tiles, self._wanted = head, tiles, wanted
        self._compute_dtype = compute_dtype
        self._exact: dict[str, Any] = {
            "dtype": torch.promote_types(compute_dtype, torch.float32),
            "device": hidden_NH.device,
        }
        # Divided by a count of tokens, gradients would fall below fp16's range before the loss scale lifts them.
        is_late = compute_dtype == torch.float16
        self.late_factor = head.loss_factor if is_late else 1.0
        self._entropy = cross_entropy_of(
            head,
            len(weight_VH),
            1.0 if is_late else head.loss_factor,
            compute_dtype=compute_dtype,
            device=hidden_NH.device,
            kernel=kernel,
        )
        self.d_hidden_NH: Tensor | None = None
        self.d_bias_V = torch.zeros(len(weight_VH), **self._exact) if wanted.bias else None

    def in_one_pass(self) -> Tensor:
        """Compute the loss with all of the vocabulary at once."""
        loss = torch.zeros((), **self._exact)
        if self._wanted.hidden:
            self.d_hidden_NH = torch.empty_like(self._hidden_NH)
        rows = slice(0, len(self._weight_VH))
        weight_VH, d_weight = self._weight(rows), self._new_weight_gradient(rows)
        for tokens in self._chunks(d_weight):
            hidden_CH, logits_CV = self._logits(tokens, weight_VH, rows)
            losses_C1 = self._entropy.losses_(logits_CV, self._labels_N[tokens], gradient=self._wanted.any)
            loss += losses_C1.sum()
            if self.d_hidden_NH is not None:
                self.d_hidden_NH[tokens] = logits_CV @ weight_VH
            self._take(rows, d_weight, logits_CV, hidden_CH)
            del logits_CV  # else it lives while the next chunk's are computed
        del weight_VH
        self._hand_over(rows, d_weight)
        return loss

    def in_two_passes(self) -> Tensor:
        """Compute the loss tile by tile: one pass for each token's statistics over all tiles, one for its gradients."""
        log_sum_N1, loss = self._pass_for_loss()
        if self._wanted.any:
            self._pass_for_gradients(log_sum_N1)
        return loss

    def _pass_for_loss(self) -> tuple[Tensor, Tensor]:
        log_sum_N1 = torch.full((len(self._labels_N), 1), -torch.inf, **self._exact)
        target_N1 = torch.zeros((len(self._labels_N), 1), **self._exact)
        for rows in self._tile_rows():
            weight_WH = self._weight(rows)
            for tokens in self._chunks():
                _, logits_CW = self._logits(tokens, weight_WH, rows)
                log_sum_C1, target_C1 = self._entropy.statistics_(
                    logits_CW, self._labels_N[tokens], rows.start
                )
                log_sum_N1[tokens] = torch.logaddexp(log_sum_N1[tokens], log_sum_C1)
                target_N1[tokens] += target_C1
                del logits_CW
            del weight_WH
        return log_sum_N1, (log_sum_N1 - target_N1).sum()

    def _pass_for_gradients(self, log_sum_N1: Tensor) -> None:
        d_hidden_NH = (
            torch.zeros_like(self._hidden_NH, dtype=self._exact["dtype"]) if self._wanted.hidden else None
        )
        for rows in reversed(self._tile_rows()):
            weight_WH, d_weight = self._weight(rows), self._new_weight_gradient(rows)
            for tokens in self._chunks(d_weight):
                hidden_CH, logits_CW = self._logits(tokens, weight_WH, rows)
                self._entropy.gradient_(logits_CW, self._labels_N[tokens], rows.start, log_sum_N1[tokens])
                if d_hidden_NH is not None:
                    d_hidden_NH[tokens] += logits_CW @ weight_WH
                self._take(rows, d_weight, logits_CW, hidden_CH)
                del logits_CW
            del weight_WH
            self._hand_over(rows, d_weight)
        if d_hidden_NH is not None:
            self.d_hidden_NH = d_hidden_NH.to(self._hidden_NH.dtype)

    # --- steps shared by both passes ---------------------------------------------------------------------------------

    def _chunks(self, d_weight: WeightGradient | None = None) -> Iterator[slice]:
        """Return each chunk's tokens; a group that is added to the weight's gradient together repeats alike."""
        size = self._head.chunk_tokens
        chunks = [slice(start, start + size) for start in range(0, len(self._labels_N), size)]
        num_alike = 1 if d_weight is None else d_weight.chunks_added_together(size, self._compute_dtype)
        groups = [chunks[first : first + num_alike] for first in range(0, len(chunks), num_alike)]
        return itertools.chain.from_iterable(rounds(groups))

    def _tile_rows(self) -> list[slice]:
        size, vocabulary = self._head.tile_rows, len(self._weight_VH)
        return [slice(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]

    def _weight(self, rows: slice) -> Tensor:
        return self._tiles.weight(rows).to(self._compute_dtype)

    def _logits(self, tokens: slice, weight_WH: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the head's input in the type of the products, and its output."""
        hidden_CH = self._hidden_NH[tokens].to(self._compute_dtype)
        bias_W = None if self._bias_V is None else self._bias_V[rows].to(self._compute_dtype)
        return hidden_CH, F.linear(hidden_CH, weight_WH, bias_W)

    def _new_weight_gradient(self, rows: slice) -> WeightGradient | None:
        rows = self._wanted.rows_in(rows)
        if not self._wanted.weight or rows.start == rows.stop:
            return None
        shape = torch.Size((rows.stop - rows.start, self._weight_VH.shape[1]))
        return WeightGradient(
            shape,
            self._weight_VH.dtype,
            self._hidden_NH.device,
            len(self._labels_N),
            self._tiles.sum_of(rows),
            self._compute_dtype,
        )

    def _take(
        self, rows: slice, d_weight: WeightGradient | None, d_logits_CW: Tensor, hidden_CH: Tensor
    ) -> None:
        if self.d_bias_V is not None:
            self.d_bias_V[rows] += d_logits_CW.sum(0, dtype=self._exact["dtype"])
        if d_weight is not None:
            trained = self._wanted.rows_in(rows)
            if trained != rows:
                # A copy: it may be kept, and a view would keep all logits.
                d_logits_CW = d_logits_CW[:, trained.start - rows.start : trained.stop - rows.start].clone()
            d_weight.add(d_logits_CW, hidden_CH)

    def _hand_over(self, rows: slice, d_weight: WeightGradient | None) -> None:
        if d_weight is not None:
            self._tiles.add_gradient(self._wanted.rows_in(rows), d_weight.finish())
