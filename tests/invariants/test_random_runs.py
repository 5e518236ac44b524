"""Runs put together at random, on models of random sizes, train as their plain runs do.

``pytest -m slow --hypothesis-seed=1000 tests/invariants/test_random_runs.py`` goes on with other runs. One that finds
something is kept in ``found_runs.yaml``.
"""

import tempfile
from pathlib import Path

import pytest
import yaml
from ground_truth.ladder_run import Rows
from ground_truth.random_runs import RandomRun, difference_from_plain, has_way_out, random_runs
from hypothesis import given, settings

from lowmem_ft.foundation.errors import UserError


def _found_runs():
    table = yaml.safe_load((Path(__file__).parent / "found_runs.yaml").read_text(encoding="utf-8"))
    return {what: RandomRun(**{**fields, "rows": Rows(**fields["rows"])}) for what, fields in table.items()}


FOUND = _found_runs()
REFUSED = FOUND.pop("refused by the model alone")


def problem_of(run):
    """What is wrong with a run; a model may refuse it with a way out."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return difference_from_plain(run, Path(folder))
        except UserError as error:
            return None if has_way_out(error) else str(error)


@settings(max_examples=6, derandomize=True)
@given(random_runs())
def test_a_random_run_is_as_the_plain_run(run):
    assert problem_of(run) is None


@pytest.mark.slow
@given(random_runs())
def test_further_random_runs_are_as_their_plain_runs(run):
    assert problem_of(run) is None


@pytest.mark.parametrize("what", FOUND)
def test_a_run_that_once_found_something_is_as_the_plain_run(what, tmp_path):
    assert difference_from_plain(FOUND[what], tmp_path) is None


def test_a_run_that_only_the_model_refuses_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(UserError) as refused:
        difference_from_plain(REFUSED, tmp_path)
    assert has_way_out(refused.value)
