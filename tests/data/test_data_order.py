"""The order of an epoch comes from the seed and the epoch alone."""

import numpy as np
import torch

from lowmem_ft.data.batches.order import MEGABATCH_ROWS, epoch_order

LENGTHS = np.random.default_rng(0).integers(1, 100, 1300)
LENGTHS[777] = 500


def order(epoch, *, seed=3, shuffle=True, group_by_length=False):
    return epoch_order(
        LENGTHS, seed=seed, epoch=epoch, shuffle=shuffle, group_by_length=group_by_length
    ).tolist()


def test_every_row_comes_once_in_every_epoch():
    for epoch in (0, 1):
        for group_by_length in (False, True):
            assert sorted(order(epoch, group_by_length=group_by_length)) == list(range(len(LENGTHS)))


def test_orders_differ_by_epoch_and_seed_and_repeat_exactly():
    assert order(1) == order(1)
    assert order(1) != order(2)
    assert order(1) != order(1, seed=4)


def test_the_longest_row_comes_first_in_the_first_epoch():
    assert order(0)[0] == 777
    assert order(0, group_by_length=True)[0] == 777


def test_without_shuffling_the_order_of_the_data_stays():
    assert order(0, shuffle=False) == list(range(len(LENGTHS)))


def test_grouping_sorts_inside_megabatches():
    lengths = LENGTHS[order(1, group_by_length=True)]
    rises = np.flatnonzero(np.diff(lengths) > 0)
    assert len(rises) <= len(LENGTHS) // MEGABATCH_ROWS


def test_global_generators_are_not_touched():
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    order(0)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
