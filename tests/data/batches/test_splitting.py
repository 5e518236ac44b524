"""Micro-batches in smaller pieces: nothing is lost, and no document is cut."""

from __future__ import annotations

import pytest
import torch

from lowmem_ft.data.batches.batch import LabelledRows
from lowmem_ft.data.batches.splitting import half_of, pieces
from lowmem_ft.data.row import IGNORED_LABEL


def rows(*documents, padding=0):
    """One row a number, or where it is a list, of several documents."""
    lengths = [[row] if isinstance(row, int) else row for row in documents]
    width = max(map(sum, lengths)) + padding
    ids_BT = torch.arange(len(lengths) * width).view(len(lengths), width)
    labels_BT = torch.full_like(ids_BT, IGNORED_LABEL)
    positions_BT = torch.zeros_like(ids_BT)
    for b, row in enumerate(lengths):
        end = 0
        for length in [*row, width - sum(row)]:
            start, end = end, end + length
            positions_BT[b, start:end] = torch.arange(length)
            labels_BT[b, start + 1 : min(end, sum(row))] = ids_BT[b, start + 1 : min(end, sum(row))]
    is_packed = any(isinstance(row, list) for row in documents)
    return LabelledRows(
        input_ids_BT=ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=positions_BT if is_packed else None,
        num_label_tokens=int((labels_BT != IGNORED_LABEL).sum()),
    )


def shapes(parts):
    return [tuple(part.input_ids_BT.shape) for part in parts]


@pytest.mark.parametrize(
    "whole,max_tokens,expected",
    [
        (rows(8, 5, 7), None, [(3, 8)]),
        (rows(8, 5, 7), 24, [(3, 8)]),
        (rows(8, 5, 7), 23, [(2, 8), (1, 8)]),
        (rows(8, 5, 7), 16, [(2, 8), (1, 8)]),
        (rows(8, 5, 7), 15, [(1, 8)] * 3),
        (rows(8, 5, 7), 3, [(1, 8)] * 3),
        (rows([3, 5, 4, 4]), 8, [(1, 8), (1, 8)]),
        (rows([3, 5, 4, 4]), 7, [(1, 3), (1, 5), (1, 4), (1, 4)]),
        (rows([3, 9, 2]), 4, [(1, 3), (1, 9), (1, 2)]),
        (rows([3, 5], [4, 4]), 8, [(1, 8), (1, 8)]),
        (rows([3, 5], [4, 4]), 5, [(1, 3), (1, 5), (1, 4), (1, 4)]),
    ],
)
def test_pieces_have_no_more_tokens_than_asked_where_they_can_be_cut(whole, max_tokens, expected):
    parts = pieces(whole, max_tokens)
    assert shapes(parts) == expected
    for name in ("input_ids_BT", "labels_BT", "position_ids_BT"):
        if getattr(whole, name) is not None:
            together = torch.cat([getattr(part, name).flatten() for part in parts])
            assert torch.equal(together, getattr(whole, name).flatten())
    assert [part.num_label_tokens for part in parts] == [
        int((part.labels_BT[:, 1:] != IGNORED_LABEL).sum()) for part in parts
    ]
    assert sum(part.num_label_tokens for part in parts) == whole.num_label_tokens


def test_padding_at_the_end_of_packed_rows_is_no_piece_of_its_own():
    assert shapes(pieces(rows([6, 5], padding=5), 6)) == [(1, 6), (1, 10)]
    assert half_of(rows([11], padding=5)) is None


@pytest.mark.parametrize(
    "whole,expected",
    [
        (rows(8), None),
        (rows([8]), None),
        (rows(8, 5), 8),
        (rows(8, 5, 7), 16),
        (rows([3, 5, 4, 4]), 8),
        (rows([4, 4, 4]), 8),
        (rows([1, 9]), 9),
    ],
)
def test_half_is_the_larger_part_of_the_most_even_cut(whole, expected):
    assert half_of(whole) == expected
    if expected is not None:
        assert len(pieces(whole, expected)) == 2
