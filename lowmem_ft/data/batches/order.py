"""The order of the rows in an epoch, a function of only the seed and the epoch."""

from __future__ import annotations

import numpy as np

MEGABATCH_ROWS = 512
"""Rows that ``group_by_length`` sorts as a group; fixed, so that the order does not depend on the batch size."""


def epoch_order(
    row_lengths: np.ndarray, *, seed: int, epoch: int, shuffle: bool, group_by_length: bool
) -> np.ndarray:
    """Return the row indices of one epoch, each once.

    In epoch 0 of a shuffled run the longest row comes first, so that a micro-batch too large for the device fails at
    once rather than after hours.

    Args:
        row_lengths: tokens of each row.
        seed: the run's seed.
        epoch: from 0.
        shuffle: whether each epoch gets a new permutation; False keeps the order of the data, in epoch 0 too.
        group_by_length: sort by length inside shuffled groups of 512 rows, longest first.

    Returns:
        int64 indices. No global random generator is read or advanced.
    """
    if not shuffle:
        return np.arange(len(row_lengths))
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(row_lengths))
    if group_by_length:
        # Already random: sorting inside each group keeps its members random.
        groups = [order[start : start + MEGABATCH_ROWS] for start in range(0, len(order), MEGABATCH_ROWS)]
        groups = [group[np.argsort(-row_lengths[group], kind="stable")] for group in groups]
        order = np.concatenate([groups[index] for index in generator.permutation(len(groups))])
    return _longest_first(order, row_lengths, group_by_length) if epoch == 0 else order


def _longest_first(order: np.ndarray, row_lengths: np.ndarray, group_by_length: bool) -> np.ndarray:
    at = int(np.argmax(row_lengths[order]))
    if not group_by_length:
        return np.concatenate([order[at : at + 1], order[:at], order[at + 1 :]])
    # The longest row heads its group, so rotating the order cuts no group in two.
    return np.roll(order, -at)
