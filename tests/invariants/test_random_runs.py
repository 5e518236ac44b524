"""Runs put together at random, on models of random sizes, train as their plain runs do.

``python scripts/try_random_runs.py --seed 1000`` goes on with other seeds. A run that finds something is kept in
``found_runs.yaml``.
"""

from pathlib import Path

import pytest
import yaml
from ground_truth.ladder_run import Rows
from ground_truth.random_runs import RandomRun, difference_from_plain, has_way_out, random_run

from lowmem_ft.foundation.errors import UserError


def _found_runs():
    table = yaml.safe_load((Path(__file__).parent / "found_runs.yaml").read_text(encoding="utf-8"))
    return {what: RandomRun(**{**fields, "rows": Rows(**fields["rows"])}) for what, fields in table.items()}


FOUND = _found_runs()
REFUSED = FOUND.pop("refused by the model alone")


@pytest.mark.parametrize(
    "seed", [*range(1, 6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 19))]
)
def test_a_random_run_is_as_the_plain_run(seed, tmp_path):
    assert difference_from_plain(random_run(seed), tmp_path) is None


@pytest.mark.parametrize("what", FOUND)
def test_a_run_that_once_found_something_is_as_the_plain_run(what, tmp_path):
    assert difference_from_plain(FOUND[what], tmp_path) is None


def test_a_run_that_only_the_model_refuses_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(UserError) as refused:
        difference_from_plain(REFUSED, tmp_path)
    assert has_way_out(refused.value)
