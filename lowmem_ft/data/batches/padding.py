"""The padding of an epoch's micro-batches, from the lengths of its rows. Axes: R rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Tokens of an epoch.

    Args:
        num_rows: rows of the micro-batches.
        tokens: tokens of the examples.
        computed: tokens of the micro-batches, padding included: what a step computes.
    """

    num_rows: int
    tokens: int
    computed: int

    @property
    def share(self) -> float:
        """Share of the computed tokens that is padding."""
        return 1 - self.tokens / self.computed if self.computed else 0.0


def padding_of(
    row_lengths_R: np.ndarray, rows_per_batch: int, padded_length: Callable[[int], int]
) -> Padding:
    """Return the padding of micro-batches of consecutive rows.

    Args:
        row_lengths_R: tokens of each row, in the order of the epoch.
        rows_per_batch: rows of a micro-batch; the last one may have fewer.
        padded_length: returns the length of all rows of a micro-batch from that of the longest.
    """
    starts = np.arange(0, len(row_lengths_R), rows_per_batch)
    longest = np.maximum.reduceat(row_lengths_R, starts) if len(starts) else starts
    sizes = np.diff(np.append(starts, len(row_lengths_R)))
    found, which = np.unique(longest, return_inverse=True)
    widths = np.array([padded_length(int(length)) for length in found], dtype=np.int64)
    return Padding(
        num_rows=len(row_lengths_R),
        tokens=int(row_lengths_R.sum()),
        computed=int((widths[which] * sizes).sum()) if len(starts) else 0,
    )
