"""Runs put together at random, on models of random sizes, train as their plain runs do.

``python scripts/try_random_runs.py --seed 1000`` goes on with other seeds.
"""

import pytest
from ground_truth.random_runs import difference_from_plain, has_way_out, random_run

from lowmem_ft.errors import UserError

FOUND_SOMETHING = {
    20: "tiles of the head that began inside a block of 8-bit state",
    24: "an MLP's output that its layer changes in place",
    214: "biases of quantised layers, cast anew in each visit of their layer",
    252: "adapters of fused experts without a gradient from tiles of the MLP",
}


@pytest.mark.parametrize("seed", [*range(1, 19), *FOUND_SOMETHING])
def test_a_random_run_is_as_the_plain_run(seed, tmp_path):
    assert difference_from_plain(random_run(seed), tmp_path) is None


def test_a_run_that_only_the_model_refuses_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(UserError) as refused:
        difference_from_plain(random_run(0), tmp_path)
    assert has_way_out(refused.value)
