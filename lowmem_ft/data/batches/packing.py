"""Best-fit decreasing packing: short examples share rows of a fixed capacity.

Source: Ding et al., "Fewer Truncations Improve Language Modeling", 2024.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Assignment of examples to rows: ``members[offsets[i]:offsets[i + 1]]`` are the examples of row ``i``.

    Args:
        members: int64 indices of examples, each once.
        offsets: int64, one more than there are rows.
    """

    members: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, index: int) -> np.ndarray:
        """Return the examples of one row."""
        return self.members[self.offsets[index] : self.offsets[index + 1]]


def pack_best_fit(lengths: np.ndarray, capacity: int) -> PackedRows:
    """Pack every example once into rows of at most ``capacity`` tokens.

    From the longest example to the shortest, each goes to the row with the least space left that still holds it. Rows
    are grouped by their remaining space and equal lengths are placed together, so a million examples take about a
    second.

    Args:
        lengths: tokens of each example, each between 1 and ``capacity``.
        capacity: tokens of a row.

    Returns:
        The rows, in the order in which they were opened; deterministic.
    """
    assert lengths.size == 0 or (lengths.min() >= 1 and lengths.max() <= capacity)
    rows: list[list[int]] = []
    rows_by_space: dict[int, list[int]] = {}
    spaces: list[int] = []  # the keys of rows_by_space, ascending

    def put_back(space: int, row: int) -> None:
        if space not in rows_by_space:
            rows_by_space[space] = []
            insort(spaces, space)
        rows_by_space[space].append(row)

    longest_first = np.argsort(-lengths, kind="stable")
    starts_of_equal = np.flatnonzero(np.diff(lengths[longest_first], prepend=-1))
    for equal in np.split(longest_first, starts_of_equal[1:]) if lengths.size else []:
        waiting, length, placed = equal.tolist(), int(lengths[equal[0]]), 0
        while placed < len(waiting):
            at = bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces[at]
                row = rows_by_space[space].pop()
                if not rows_by_space[space]:
                    del rows_by_space[space], spaces[at]
            else:
                space, row = capacity, len(rows)
                rows.append([])
            # A row that just became fuller is also the best fit for the next equal example, until it is full.
            fitting = waiting[placed : placed + space // length]
            rows[row] += fitting
            placed += len(fitting)
            put_back(space - length * len(fitting), row)

    sizes = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    return PackedRows(
        members=np.fromiter((example for row in rows for example in row), dtype=np.int64, count=lengths.size),
        offsets=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)]),
    )
