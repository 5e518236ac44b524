"""Several micro-batches as one: the same rows, tokens and labels."""

from __future__ import annotations

import torch

from lowmem_ft.data.batches.batch import Batch, merged
from lowmem_ft.data.row import IGNORED_LABEL


def batch(num_rows, length, *, packed=False, first_sample=0):
    ids_BT = torch.arange(num_rows * length).view(num_rows, length) + 100 * length
    labels_BT = ids_BT.clone()
    labels_BT[:, 0] = IGNORED_LABEL
    return Batch(
        input_ids_BT=ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=torch.arange(length).repeat(num_rows, 1) if packed else None,
        sample_ids=tuple(range(first_sample, first_sample + num_rows)),
        num_label_tokens=num_rows * (length - 1),
        num_tokens=num_rows * length,
    )


def test_rows_are_stacked_and_padded_to_the_longest():
    one, other = batch(2, 5), batch(1, 8, first_sample=2)
    both = merged([one, other])
    assert both.input_ids_BT.shape == both.labels_BT.shape == (3, 8)
    assert torch.equal(both.input_ids_BT[:2, :5], one.input_ids_BT)
    assert torch.equal(both.input_ids_BT[2:], other.input_ids_BT)
    assert (both.labels_BT[:2, 5:] == IGNORED_LABEL).all()
    assert both.sample_ids == (0, 1, 2)
    assert both.num_label_tokens == int((both.labels_BT != IGNORED_LABEL).sum()) == 2 * 4 + 7
    assert both.num_tokens == 2 * 5 + 8
    assert both.position_ids_BT is None


def test_the_padding_of_packed_rows_is_a_document_of_its_own():
    both = merged([batch(1, 4, packed=True), batch(1, 7, packed=True)])
    assert both.position_ids_BT is not None
    assert both.position_ids_BT.tolist() == [[0, 1, 2, 3, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6]]


def test_rows_never_have_as_many_tokens_as_there_are_rows():
    both = merged([batch(2, 4, packed=True), batch(2, 4, packed=True)])
    assert both.input_ids_BT.shape == both.labels_BT.shape == both.position_ids_BT.shape == (4, 5)
    assert both.num_label_tokens == int((both.labels_BT != IGNORED_LABEL).sum())
