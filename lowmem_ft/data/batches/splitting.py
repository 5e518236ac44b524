"""Micro-batches split into smaller pieces: by rows, and a row of several documents between documents.

A window that is split has the losses and gradients of the whole one, except for the order of sums: a row attends to no
other row, and a document to no other document. If that does not hold (a loss over the routers of all rows, batch norm),
do not split.

Axes: B rows, T tokens of a row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from lowmem_ft.data.batches.batch import LabelledRows
from lowmem_ft.data.row import IGNORED_LABEL


def pieces(rows: LabelledRows, max_tokens: int | None) -> list[LabelledRows]:
    """Split rows into pieces of at most this many tokens, padding included; an indivisible piece may have more.

    Args:
        rows: on the host.
        max_tokens: maximum tokens of a piece; None: all in one.

    Returns:
        The pieces, in the order of the rows; together they have its labels.
    """
    if max_tokens is None or rows.input_ids_BT.numel() <= max_tokens:
        return [rows]
    num_rows, length = rows.input_ids_BT.shape
    at_once = _rows_within(max_tokens, length)
    if at_once < num_rows:
        parts = [_part(rows, slice(b, b + at_once), slice(None)) for b in range(0, num_rows, at_once)]
        return [piece for part in parts for piece in pieces(part, max_tokens)]
    if num_rows > 1:
        return [rows]
    ends = list(_packed(_document_ends(rows), max_tokens))
    return [_part(rows, slice(None), slice(*span)) for span in zip([0, *ends[:-1]], ends, strict=True)]


def half_of(rows: LabelledRows) -> int | None:
    """Return the fewest tokens that the larger part can have if the rows are cut in two; None: they cannot be cut."""
    num_rows, length = rows.input_ids_BT.shape
    if num_rows > 1:
        return half_of_rows(num_rows, length)
    *cuts, end = _document_ends(rows)
    return min((max(cut, end - cut) for cut in cuts), default=None)


def half_of_rows(num_rows: int, length: int) -> int | None:
    """Return the same for rows that are cut only between rows."""
    return -(-num_rows // 2) * length if num_rows > 1 else None


def _rows_within(max_tokens: int, length: int) -> int:
    """Return how many rows of this length have at most ``max_tokens`` tokens; at least one."""
    return max(1, max_tokens // length)


def _part(rows: LabelledRows, of_B: slice, of_T: slice) -> LabelledRows:
    labels_BT = rows.labels_BT[of_B, of_T]
    positions_BT = rows.position_ids_BT
    return LabelledRows(
        input_ids_BT=rows.input_ids_BT[of_B, of_T],
        labels_BT=labels_BT,
        position_ids_BT=None if positions_BT is None else positions_BT[of_B, of_T],
        num_label_tokens=int((labels_BT != IGNORED_LABEL).sum()),
    )


def _document_ends(row: LabelledRows) -> list[int]:
    """Return the ends of one row's documents; a tail without labels, such as padding, belongs to the last one."""
    length = row.input_ids_BT.shape[1]
    if row.position_ids_BT is None:
        return [length]
    starts_T = row.position_ids_BT[0] == 0
    labelled = torch.nonzero(row.labels_BT[0] != IGNORED_LABEL)
    last = int(labelled[-1]) if len(labelled) else 0
    starts = [start for (start,) in torch.nonzero(starts_T).tolist() if 0 < start <= last]
    return [*starts, length]


def _packed(ends: Sequence[int], max_tokens: int) -> Iterator[int]:
    """Yield the ends of pieces that hold as many whole documents as fit."""
    start = 0
    for end, following in itertools.pairwise(ends):
        if following - start > max_tokens:
            yield end
            start = end
    yield ends[-1]
