"""Losses by ``data.max_length``, from whole examples. Axes: R examples, T tokens end to end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Cut:
    """The losses by one ``data.max_length``.

    Args:
        max_length: the limit, in tokens.
        rows: rows that are trained on.
        rows_cut: examples longer than the limit; raw text is split there, all others lose the rest.
        answers_cut: examples that lose the end of what is learnt, and with it the end of the turn.
        rows_left_out: examples of which nothing is left to learn.
        tokens_lost: tokens beyond the limit.
        labels_lost: learnt tokens beyond the limit.
    """

    max_length: int
    rows: int
    rows_cut: int
    answers_cut: int
    rows_left_out: int
    tokens_lost: int
    labels_lost: int


class LengthProfile:
    """Lengths and learnt positions of whole examples.

    Args:
        masks: the lengths of some examples and their learnt masks end to end, for all examples in turn; each has a
            learnt token.
        splits: whether examples are raw text, which is split at a limit and loses nothing.
    """

    def __init__(self, masks: Iterable[tuple[np.ndarray, np.ndarray]], *, splits: bool) -> None:
        nothing = np.zeros(0, dtype=np.int64)
        lengths, first, last, counts = [nothing], [nothing], [nothing], nothing
        for lengths_R, is_learnt_T in masks:
            starts_R = np.cumsum(lengths_R) - lengths_R
            row_T = np.repeat(np.arange(len(lengths_R)), lengths_R)[is_learnt_T]
            position_T = np.flatnonzero(is_learnt_T) - starts_R[row_T]
            begins = np.flatnonzero(np.diff(row_T, prepend=-1))
            lengths.append(lengths_R)
            first.append(position_T[begins])
            last.append(position_T[np.append(begins[1:], len(row_T)) - 1])
            counts = _sum(counts, np.bincount(position_T))
        self.lengths_R = np.concatenate(lengths).astype(np.int64)
        self._first_R, self._last_R = np.concatenate(first), np.concatenate(last)
        self._labels_before = np.append(0, np.cumsum(counts))
        self._splits = splits

    @property
    def num_labels(self) -> int:
        """Learnt tokens of whole examples."""
        return int(self._labels_before[-1])

    @property
    def longest(self) -> int:
        """Tokens of the longest example."""
        return int(self.lengths_R.max(initial=0))

    def cut_at(self, max_length: int) -> Cut:
        """Return what a limit would cut."""
        lengths_R = self.lengths_R
        rows_cut = int((lengths_R > max_length).sum())
        if self._splits:
            return Cut(
                max_length=max_length,
                rows=len(self.row_lengths(max_length)),
                rows_cut=rows_cut,
                answers_cut=0,
                rows_left_out=0,
                tokens_lost=0,
                labels_lost=0,
            )
        kept_labels = int(self._labels_before[min(max_length, len(self._labels_before) - 1)])
        left_out = int((self._first_R >= max_length).sum())
        return Cut(
            max_length=max_length,
            rows=len(lengths_R) - left_out,
            rows_cut=rows_cut,
            answers_cut=int((self._last_R >= max_length).sum()),
            rows_left_out=left_out,
            tokens_lost=int(np.maximum(lengths_R - max_length, 0).sum()),
            labels_lost=self.num_labels - kept_labels,
        )

    def row_lengths(self, max_length: int | None) -> np.ndarray:
        """Return the tokens of each row that is trained on under a limit, in the order of the examples."""
        lengths_R = self.lengths_R
        if max_length is None:
            return lengths_R
        if not self._splits:
            return np.minimum(lengths_R, max_length)[self._first_R < max_length]
        # A last piece of one token is left out, as in training: nothing comes before it to predict it from.
        pieces_R = -(-np.maximum(lengths_R - 1, 1) // max_length)
        ends = np.cumsum(pieces_R) - 1
        rows = np.full(int(pieces_R.sum()), max_length, dtype=np.int64)
        rows[ends] = np.minimum(lengths_R - (pieces_R - 1) * max_length, max_length)
        return rows


def _sum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the sum of two arrays of counts, of which one may be longer."""
    longer, shorter = (a, b) if len(a) >= len(b) else (b, a)
    total = longer.astype(np.int64)
    total[: len(shorter)] += shorter
    return total
