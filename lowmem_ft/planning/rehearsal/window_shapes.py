"""Shapes of data windows: the sizes that decide a step's memory and time, rounded up to a few classes.

Axes: B rows of a micro-batch, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.data.row import IGNORED_LABEL
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values

MOST_SHAPES, MOST_EVALUATION_SHAPES = 6, 4
"""Most shapes that are traced separately, as a step of an 8B takes seconds to trace.

Later ones count as the smallest traced shape that holds them, except a new largest one. Their seconds are interpolated
between those of the traced shapes (``seconds_by_tokens.py``)."""

SHORTEST = 64
"""Tokens of a row below which lengths are not distinguished."""

_STEPS_OF_AN_OCTAVE = 4
"""Lengths are rounded up by at most a quarter of the next lower power of two."""

_SHARES_OF_LABELS = 4
"""Label tokens are rounded up to this many parts of all tokens."""


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """The sizes of some micro-batches that decide how a step over them runs.

    Args:
        num_micro_batches: number that the model gets one after the other.
        rows: rows of all of them.
        length: tokens of the longest row, padding included.
        label_tokens: label tokens of all of them.
    """

    num_micro_batches: int
    rows: int
    length: int
    label_tokens: int

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> WindowShape:
        """Return the shape of micro-batches that go through the layers together, or of one."""
        return cls(
            num_micro_batches=len(batches),
            rows=sum(len(batch.input_ids_BT) for batch in batches),
            length=max(batch.input_ids_BT.shape[1] for batch in batches),
            label_tokens=sum(batch.num_label_tokens for batch in batches),
        )

    @property
    def tokens(self) -> int:
        """Tokens of all rows, padding included."""
        return self.rows * self.length

    def holds(self, other: WindowShape) -> bool:
        """Return whether a step over this shape needs no less than one over the other."""
        return all(one >= another for one, another in zip(astuple(self), astuple(other), strict=True))

    def __str__(self) -> str:
        rows = "1 row" if self.rows == 1 else f"{self.rows} rows"
        return f"{rows} x {self.length:,} tokens, {self.label_tokens:,} of them learnt"


class Counted(NamedTuple):
    """Micro-batches with the shape that they count as.

    Args:
        shape: at least as large in every dimension.
        tokens: their own tokens, padding included.
    """

    shape: WindowShape
    tokens: int


class Shapes:
    """The shapes that represent all others.

    The largest so far represents itself alone, exactly; the rest are rounded up, and once ``most`` are known, each
    counts as the smallest of them that holds it.

    Args:
        most: number of shapes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[WindowShape, None] = {}

    def class_of(self, shape: WindowShape) -> tuple[Counted, bool]:
        """Return what a shape counts as, and whether that is new."""
        found = self._found(shape)
        is_new = found not in self._known
        self._known[found] = None
        return Counted(found, shape.tokens), is_new

    def _found(self, shape: WindowShape) -> WindowShape:
        if shape in self._known:
            return shape
        largest = max(self._known, key=lambda known: known.tokens, default=None)
        if largest is None or shape.tokens > largest.tokens:
            return shape
        rounded = _rounded_up(shape, largest)
        if rounded in self._known or len(self._known) < self._most:
            return rounded
        holding = [known for known in self._known if known.holds(shape)]
        return min(holding, key=lambda known: (known.tokens, known.label_tokens), default=rounded)


def _rounded_up(shape: WindowShape, largest: WindowShape) -> WindowShape:
    """Return the rounded shape, no longer than the largest, which is exact."""
    length = max(SHORTEST, _rounded_length(shape.length))
    if shape.length <= largest.length:
        length = min(length, largest.length)
    part = -(-shape.rows * length // _SHARES_OF_LABELS)
    labels = min(-(-shape.label_tokens // part) * part, shape.rows * (length - 1))
    return WindowShape(
        num_micro_batches=shape.num_micro_batches,
        rows=shape.rows,
        length=length,
        label_tokens=max(labels, shape.label_tokens),
    )


def _rounded_length(length: int) -> int:
    step = max(1, 2 ** (length - 1).bit_length() // (2 * _STEPS_OF_AN_OCTAVE))
    return -(-length // step) * step


def in_shape(batches: Sequence[Batch], shape: WindowShape) -> list[Batch]:
    """Return micro-batches padded on the right and with more of their tokens learnt, until they have a shape.

    Args:
        batches: micro-batches with a shape that is no larger.
        shape: the shape to reach.

    Returns:
        The same ones if they already have it.
    """
    if WindowShape.of(batches) == shape:
        return list(batches)
    padded, wanted = [], shape.label_tokens
    for batch in batches:
        rows, labels = len(batch.input_ids_BT), 0
        labels_BT = np.full((rows, shape.length), IGNORED_LABEL, dtype=np.int64)
        for row_T in labels_BT:
            more = min(wanted, shape.length - 1)
            row_T[1 : 1 + more] = 1
            wanted, labels = wanted - more, labels + more
        padded.append(
            Batch(
                input_ids_BT=torch.from_numpy(np.ones((rows, shape.length), dtype=np.int64)),
                labels_BT=torch.from_numpy(labels_BT),
                position_ids_BT=_with_padding(batch.position_ids_BT, shape.length),
                sample_ids=batch.sample_ids,
                num_label_tokens=labels,
                num_tokens=batch.num_tokens,
            )
        )
    return padded


def _with_padding(positions_BT: Tensor | None, length: int) -> Tensor | None:
    """Return positions whose borders do not move; padding is a document of its own, as in the collator."""
    if positions_BT is None:
        return None
    known_BT = known_values(positions_BT)
    assert known_BT is not None, "positions are small integers, whose values are computed"
    padding_T = np.arange(length - known_BT.shape[1])
    rows = [np.concatenate([row_T, padding_T]) for row_T in known_BT.numpy()]
    return torch.from_numpy(np.stack(rows))


def tensors_of(batches: Iterable[Batch]) -> list[Tensor]:
    """Return all tensors of the batches."""
    found = [(one.input_ids_BT, one.labels_BT, one.position_ids_BT) for one in batches]
    return [tensor for batch in found for tensor in batch if tensor is not None]
