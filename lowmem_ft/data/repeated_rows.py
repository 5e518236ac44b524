"""Duplicate rows in a run's data, and held-out rows that are also training rows, found by digests of their tokens.

Axes: R rows.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import datasets
import numpy as np

from lowmem_ft.data.batches.epoch_rows import column
from lowmem_ft.data.sources.splits import Part
from lowmem_ft.data.text.summary import MUCH_LOST
from lowmem_ft.foundation.units import counted

logger = logging.getLogger(__name__)

STREAM_NOT_LOOKED_AT = (
    "A stream is not searched for copies of rows, nor for held-out rows that are training rows."
)


@dataclass(frozen=True, kw_only=True)
class RepeatedRows:
    """Counts of equal rows, each with the tokens that it had before anything was cut.

    Args:
        training: training rows that are equal to an earlier one.
        most_copies: rows that are equal to the commonest training row, itself included.
        held_out: held-out rows that are equal to an earlier one.
        held_out_in_training: held-out rows that are equal to a training row.
    """

    training: int
    most_copies: int
    held_out: int
    held_out_in_training: int


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """Rows of several tables: their digests, sorted, and where each comes from."""

    digests_R2: np.ndarray
    sample_ids_R: np.ndarray
    parts_R: np.ndarray

    @classmethod
    def of(cls, tables: Sequence[datasets.Dataset]) -> _Rows:
        """Read the digests of kept examples; in a document that was split, only the first piece has one."""
        digests = [column(table, "row_digest").reshape(-1, 2) for table in tables]
        digests_R2 = np.concatenate([*digests, np.zeros((0, 2), dtype=np.int64)])
        ids_R = np.concatenate(
            [*(column(table, "sample_id") for table in tables), np.zeros(0, dtype=np.int64)]
        )
        parts_R = np.repeat(np.arange(len(tables)), [len(each) for each in digests])
        # A stable order: copies stay in that of their sources.
        order = np.lexsort((digests_R2[:, 1], digests_R2[:, 0]))
        order = order[digests_R2[order].any(axis=1)]
        return cls(digests_R2=digests_R2[order], sample_ids_R=ids_R[order], parts_R=parts_R[order])

    def __len__(self) -> int:
        return len(self.digests_R2)

    def starts(self) -> np.ndarray:
        """Return where each group of equal rows begins."""
        if not len(self):
            return np.zeros(0, dtype=np.int64)
        differs_R = (self.digests_R2[1:] != self.digests_R2[:-1]).any(axis=1)
        return np.concatenate([[0], 1 + np.flatnonzero(differs_R)])

    def are_in(self, others: _Rows) -> np.ndarray:
        """Return for each row whether ``others`` has its equal."""
        both = np.concatenate([others.digests_R2, self.digests_R2])
        _, groups = np.unique(_as_one(both), return_inverse=True)
        return np.isin(groups[len(others) :], groups[: len(others)])


def _as_one(digests_R2: np.ndarray) -> np.ndarray:
    """Return pairs of integers as single values that sort and compare."""
    return np.ascontiguousarray(digests_R2).view([("low", np.int64), ("high", np.int64)]).reshape(-1)


def find_repeated_rows(
    training: Sequence[datasets.Dataset],
    training_parts: Sequence[Part],
    held_out: Sequence[datasets.Dataset],
    held_out_parts: Sequence[Part],
    *,
    is_split: bool,
) -> RepeatedRows:
    """Count equal rows and log what was found: a warning for many copies, and for every leak.

    Copies that ``weight`` or ``repeats`` of a source ask for are made later, and do not count.

    Args:
        training: tables of the examples that are trained on, before they are mixed.
        training_parts: the part that each table holds.
        held_out: tables of the held-out examples.
        held_out_parts: the part that each of these holds.
        is_split: whether ``data.eval_size`` took the held-out rows from the training data.

    Returns:
        The counts.
    """
    train, evaluation = _Rows.of(training), _Rows.of(held_out)
    repeats, most = _log_copies("Training", train, training_parts)
    held_out_repeats, _ = _log_copies("Held-out", evaluation, held_out_parts)
    leaked = evaluation.are_in(train)
    if leaked.any():
        number = int(leaked.sum())
        among = np.flatnonzero(leaked)
        first = among[np.lexsort((evaluation.sample_ids_R[among], evaluation.parts_R[among]))[0]]
        logger.warning(
            "%s of %s held-out rows (%.1f%%) are also training rows (first: %s). Their loss does not measure "
            "generalisation, but the best checkpoint and early stopping depend on it. %s",
            *(f"{number:,}", f"{len(evaluation):,}", 100 * number / len(evaluation)),
            _named(evaluation, int(first), held_out_parts),
            "Remove the copies of rows from the file, so that data.eval_size holds out rows that occur once."
            if is_split
            else "Remove these rows from the training data, or name other rows to hold out.",
        )
    return RepeatedRows(
        training=repeats,
        most_copies=most,
        held_out=held_out_repeats,
        held_out_in_training=int(leaked.sum()),
    )


def _log_copies(kind: str, rows: _Rows, parts: Sequence[Part]) -> tuple[int, int]:
    """Log how many rows are copies of an earlier one; return that, and the rows of the largest group."""
    starts = rows.starts()
    if len(starts) == len(rows):
        return 0, min(1, len(rows))
    sizes = np.diff(starts, append=len(rows))
    largest, number = int(np.argmax(sizes)), len(rows) - len(starts)
    logger.log(
        logging.WARNING if number > MUCH_LOST * len(rows) else logging.INFO,
        "%s data: %s of %s (%.1f%%) are copies of an earlier row; %s stands %s times.",
        *(kind, f"{number:,}", counted(len(rows), "row"), 100 * number / len(rows)),
        *(_named(rows, int(starts[largest]), parts), f"{sizes[largest]:,}"),
    )
    return number, int(sizes[largest])


def _named(rows: _Rows, index: int, parts: Sequence[Part]) -> str:
    return f"example {rows.sample_ids_R[index]} of {parts[rows.parts_R[index]].source}"
