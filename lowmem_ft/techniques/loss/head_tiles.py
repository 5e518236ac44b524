"""The weight of a head, split into tiles of its vocabulary.

Axes: H hidden size, V vocabulary, W vocabulary of one tile.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class HeadTiles(Protocol):
    """The source of the head's weight, tile by tile, and the sink of its gradient.

    Tiles are requested in ascending order for the loss, and then in descending order for the gradients. They begin at
    multiples of ``gradients.blocks.rows_per_block``.
    """

    def weight(self, rows: slice) -> Tensor:
        """Return these rows of the weight, on the device of the hidden states; valid until the next call."""
        ...

    def add_gradient(self, rows: slice, d_weight_WH: Tensor) -> None:
        """Take the finished gradient of these rows, in the weight's type."""
        ...


class ResidentTiles:
    """A weight on the device.

    Args:
        weight_VH: the weight.

    Attributes:
        d_weight_VH: its gradient, once tiles of it have been added; rows that were not added are undefined.
    """

    def __init__(self, weight_VH: Tensor) -> None:
        self.d_weight_VH: Tensor | None = None
        self._weight_VH = weight_VH

    def weight(self, rows: slice) -> Tensor:
        """Return a view of these rows."""
        return self._weight_VH[rows]

    def add_gradient(self, rows: slice, d_weight_WH: Tensor) -> None:
        """Copy the gradient of these rows to its place."""
        if d_weight_WH.shape == self._weight_VH.shape:
            self.d_weight_VH = d_weight_WH
            return
        if self.d_weight_VH is None:
            self.d_weight_VH = torch.empty_like(self._weight_VH)
        self.d_weight_VH[rows] = d_weight_WH
