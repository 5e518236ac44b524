"""Hours and dollars of the user's data, by arithmetic."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.memory_estimate import Processes, StepTime
from lowmem_ft.reports.costs import OwnData, usd_per_million_tokens, with_cost

GPU = find_gpu("rtx-4090")


@pytest.fixture
def fitting(estimate):
    step = StepTime(seconds=2.0, tokens=8192, bound_by="compute")
    return dataclasses.replace(estimate, step=step, fits=True)


def test_hours_are_the_tokens_of_full_rows_by_the_speed(fitting):
    run = OwnData(rows=2000, epochs=3).run_on(fitting, GPU, 1500)
    assert run.tokens == 9_000_000
    assert run.hours == pytest.approx(9_000_000 / 4096 / 3600)
    assert run.usd == pytest.approx(9 * usd_per_million_tokens(fitting, GPU))


def test_several_gpus_share_the_rows_and_each_is_paid_for(fitting):
    both = dataclasses.replace(fitting, processes=Processes(strategy="fsdp2", num_processes=2))
    alone, shared = (OwnData(rows=100).run_on(each, GPU, 1000) for each in (fitting, both))
    assert shared.hours == pytest.approx(alone.hours / 2)
    assert shared.usd == pytest.approx(alone.usd)


def test_without_a_price_there_are_hours_alone(fitting):
    run = OwnData(rows=100).run_on(fitting, dataclasses.replace(GPU, prices=()), 1000)
    assert run.hours > 0
    assert run.usd is None
    assert "$" not in OwnData(rows=100).run_in_words(fitting, None, 1000)


def test_what_does_not_fit_or_has_no_speed_has_no_hours(fitting):
    data = OwnData(rows=100)
    assert data.run_on(dataclasses.replace(fitting, fits=False), GPU, 1000) is None
    assert data.run_on(dataclasses.replace(fitting, step=None), GPU, 1000) is None
    assert data.run_on(fitting, GPU, None) is None


def test_json_has_the_run_where_it_was_asked_for(fitting):
    assert "own_data" not in with_cost(fitting, GPU)
    found = with_cost(fitting, GPU, OwnData(rows=2, epochs=1.5), 1000)["own_data"]
    assert found.keys() == {"rows", "epochs", "tokens", "hours", "usd"}
    assert (found["rows"], found["epochs"], found["tokens"]) == (2, 1.5, 3000)
    unfit = dataclasses.replace(fitting, fits=False)
    assert with_cost(unfit, GPU, OwnData(rows=2), 1000)["own_data"] is None


def test_the_assumptions_are_said(fitting):
    words = OwnData(rows=1, epochs=1).run_in_words(fitting, GPU, 2048)
    assert "1 row of at most 2,048 tokens, 1 epoch: at most 2,048 tokens, as if every row were full" in words
