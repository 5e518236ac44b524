"""The shares of ``planning/planner/expectations.py``, and the estimates that they are fitted to."""

from __future__ import annotations

import dataclasses
import json

import pytest
from calibrate.expectations import FILE, errors_of, estimates, fitted, result

from lowmem_ft.planning.planner.expectations import SHARES


@pytest.fixture(scope="module")
def sample():
    return estimates()


def test_the_shares_are_those_that_the_estimates_give(sample):
    kept, found = json.loads(FILE.read_text(encoding="utf-8")), result(sample)
    assert found["sample"] == kept["sample"]
    assert found["shares"] == pytest.approx(kept["shares"], rel=0.005)
    assert found["left_out"].keys() == kept["left_out"].keys()
    for model, errors in found["left_out"].items():
        assert errors == pytest.approx(kept["left_out"][model], abs=0.002)


def test_of_a_model_that_was_left_out_no_more_is_off_than_a_search_reckons_with(sample):
    """Else it begins far from the best, and takes more estimates."""
    assert len({row.model for row in sample}) > 1
    for errors in result(sample)["left_out"].values():
        assert errors["device_bytes"] < 0.15
        assert errors["seconds"] < 0.15


def test_shares_that_are_off_are_brought_back(sample):
    few = sample[::9]
    start = dataclasses.replace(SHARES, kept=1.5 * SHARES.kept, times_moved=0.5 * SHARES.times_moved)
    found = fitted(few, start)
    assert errors_of(few, found)["seconds"] < errors_of(few, start)["seconds"]
    again = fitted(few)
    assert dataclasses.asdict(found) == pytest.approx(dataclasses.asdict(again), rel=0.01)
