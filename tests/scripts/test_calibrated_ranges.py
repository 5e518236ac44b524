"""The shares of ``foundation/memory/uncertainty.py``, the runs they are fitted to, and how often they hold another."""

import dataclasses

import pytest
from calibrate.ranges import (
    LEAST_SHARE,
    Run,
    fitted_shares,
    half_widths,
    held_when_left_out,
    measured_runs,
    public_rows,
)

from lowmem_ft.foundation.memory.uncertainty import QUANTIZED_RESERVED_SHARE, RESERVED_SHARE

RUNS = measured_runs()


def test_the_shares_are_those_that_the_runs_give():
    shares = fitted_shares(RUNS)
    assert shares["16-bit"] == pytest.approx(RESERVED_SHARE)
    assert shares["4-bit"] == pytest.approx(QUANTIZED_RESERVED_SHARE)


@pytest.mark.parametrize("group", ["name", "source"])
def test_nine_of_ten_runs_that_a_range_has_not_seen_are_in_it(group):
    held, tried = held_when_left_out(RUNS, lambda run: getattr(run, group))
    assert tried >= 50
    assert held >= 0.9 * tried


def test_a_range_is_narrow_enough_to_say_something():
    reserved, process = half_widths(RUNS)
    assert reserved <= 0.02
    assert process <= 0.04


def test_what_was_fitted_is_not_counted():
    """A run whose settings were chosen by its own number proves nothing."""
    fitted = [run for run in RUNS if run.is_fitted]
    assert [run.name for run in fitted] == [row["name"] for row in public_rows() if "fitted" in row]
    way_off = [dataclasses.replace(run, reserved=(1, 2)) for run in fitted]
    others = [run for run in RUNS if not run.is_fitted]
    assert fitted_shares([*others, *way_off]) == fitted_shares(others)


def run(error, source="a"):
    return Run(
        name=f"{error} {source}",
        kind="16-bit",
        source=source,
        is_fitted=False,
        reserved=(1000, round(1000 * (1 + error))),
        process=None,
    )


def test_most_errors_are_within_a_share():
    runs = [run(number / 1000) for number in range(1, 40)]
    assert fitted_shares(runs)["16-bit"] == pytest.approx(0.038)  # of rank 38 in 39
    assert fitted_shares(runs[:5])["16-bit"] == pytest.approx(0.005)  # of few the worst
    assert LEAST_SHARE == 0.001


def test_a_source_that_is_off_is_not_held_by_the_others():
    runs = [*(run(0.01 + number / 1e4, "a") for number in range(10)), *(run(0.05, "b") for _ in range(5))]
    assert held_when_left_out(runs, lambda run: run.source) == (10, 15)
