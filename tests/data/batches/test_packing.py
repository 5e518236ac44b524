"""Every example is packed once and no row overflows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lowmem_ft.data.batches.packing import pack_best_fit


@given(st.integers(1, 40).flatmap(lambda c: st.tuples(st.just(c), st.lists(st.integers(1, c), max_size=80))))
def test_every_example_is_in_one_row_and_no_row_is_over_capacity(case):
    capacity, lengths = case[0], np.array(case[1], dtype=np.int64)
    packed = pack_best_fit(lengths, capacity)
    assert sorted(packed.members.tolist()) == list(range(len(lengths)))
    for index in range(len(packed)):
        assert 0 < lengths[packed.row(index)].sum() <= capacity


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_the_rows_are_those_of_best_fit_decreasing_one_by_one(lengths):
    spaces = []
    for length in sorted(lengths, reverse=True):
        fitting = [space for space in spaces if space >= length]
        if fitting:
            spaces.remove(min(fitting))
        spaces.append((min(fitting) if fitting else 20) - length)
    packed = pack_best_fit(np.array(lengths), 20)
    left = [20 - int(np.array(lengths)[packed.row(i)].sum()) for i in range(len(packed))]
    assert sorted(left) == sorted(spaces)


def test_complements_fill_their_rows():
    packed = pack_best_fit(np.array([6, 1, 9, 4, 5, 5]), 10)
    assert sorted(sorted(packed.row(i).tolist()) for i in range(len(packed))) == [[0, 3], [1, 2], [4, 5]]
