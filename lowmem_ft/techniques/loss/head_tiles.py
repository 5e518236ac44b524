"""The weight of a head, split into tiles of its vocabulary.

Axes: H hidden size, V vocabulary, W vocabulary of one tile.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from lowmem_ft.techniques.gradients.gradient_sums_in_products import sum_in_grad


class HeadTiles(Protocol):
    """The source of the head's weight, tile by tile, and the sink of its gradient.

    Tiles are requested in ascending order for the loss, and then in descending order for the gradients. They begin at
    multiples of ``tensors.gradient_blocks.rows_per_block``.
    """

    def weight(self, rows: slice) -> Tensor:
        """Return these rows of the weight, on the device of the hidden states; valid until the next call."""
        ...

    def sum_of(self, rows: slice) -> Tensor | None:
        """Return the sum to which products for these rows are added; None: their gradient is handed over."""
        ...

    def add_gradient(self, rows: slice, d_weight_WH: Tensor) -> None:
        """Take the finished gradient of these rows, in the weight's type."""
        ...


class ResidentTiles:
    """A weight on the device.

    Args:
        weight_VH: the weight.
        sums: whether its ``.grad`` is the sum to which products are added.
        trained_rows: the only rows that have a gradient; None: all.

    Attributes:
        d_weight_VH: its gradient, once tiles of it have been added; rows that were not added are undefined. With
            ``trained_rows`` it has these alone.
    """

    def __init__(self, weight_VH: Tensor, *, sums: bool = False, trained_rows: range | None = None) -> None:
        self.d_weight_VH: Tensor | None = None
        self._weight_VH = weight_VH
        self._trained_rows = range(len(weight_VH)) if trained_rows is None else trained_rows
        self._sums = sums

    def weight(self, rows: slice) -> Tensor:
        """Return a view of these rows."""
        return self._weight_VH[rows]

    def sum_of(self, rows: slice) -> Tensor | None:
        """Return these rows of ``.grad``."""
        return sum_in_grad(self._weight_VH)[rows] if self._sums else None

    def add_gradient(self, rows: slice, d_weight_WH: Tensor) -> None:
        """Copy the gradient of these rows to its place, unless it is part of the sum."""
        if self._sums:
            return
        if len(d_weight_WH) == len(self._trained_rows):
            self.d_weight_VH = d_weight_WH
            return
        first, stop = self._trained_rows.start, self._trained_rows.stop
        if self.d_weight_VH is None:
            self.d_weight_VH = torch.empty_like(self._weight_VH[first:stop])
        self.d_weight_VH[rows.start - first : rows.stop - first] = d_weight_WH
