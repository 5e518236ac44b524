"""Position in the data from which a run can resume."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DataPosition:
    """Position in the data, independent of the shape of batches.

    Args:
        seed: seed of the order.
        epoch: from 0.
        index: rows of the epoch's order that are done: examples, or packed rows with packing.
    """

    seed: int
    epoch: int = 0
    index: int = 0
