"""An estimate for a processor has seconds once a step was timed on it."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft import estimate_memory
from lowmem_ft.memory.cpu_seconds import NO_SECONDS_OF_CPU, with_seconds_here
from lowmem_ft.recipe import load_recipe
from lowmem_ft.system.timed_steps import TimedStep


@pytest.fixture(scope="module")
def estimates():
    """Return estimates for a processor: as the recipe is, with twice the micro-batches, and in bfloat16."""
    settings = ((), ("training.gradient_accumulation_steps=4",), ("model.dtype=bfloat16",))
    return [estimate_memory(load_recipe("tiny", overrides=each), "cpu") for each in settings]


def step_of(estimate, seconds=2.0, **changes):
    work = estimate.cpu_work
    step = TimedStep(
        processor="a processor",
        dtype=work.dtype,
        reference_seconds=work.reference_seconds,
        seconds=seconds,
        threads=2,
        model="a model",
        date="2026-11-27",
    )
    return dataclasses.replace(step, **changes)


def test_no_seconds_before_a_step_was_timed(estimates):
    estimate = with_seconds_here(estimates[0], [])
    assert estimate.step is None
    assert NO_SECONDS_OF_CPU in estimate.not_modelled


def test_the_same_step_takes_what_it_took(estimates):
    estimate = with_seconds_here(estimates[0], [step_of(estimates[0])])
    assert estimate.step.seconds == pytest.approx(2.0)
    assert estimate.step.tokens_per_second == pytest.approx(estimate.step.tokens / 2)
    assert estimate.step.high_seconds < 2.5
    assert NO_SECONDS_OF_CPU not in estimate.not_modelled
    assert "took 2 s on this processor (2 threads, float32, 2026-11-27)" in estimate.choices[-1]


def test_twice_the_micro_batches_take_nearly_twice_as_long(estimates):
    once, twice, _ = estimates
    step = with_seconds_here(twice, [step_of(once)]).step
    assert 3.0 < step.seconds < 4.0  # the optimizer's step stays one
    assert step.high_seconds > 1.4 * step.seconds


def test_the_nearest_step_counts_and_the_youngest_of_equals(estimates):
    once, twice, _ = estimates
    timed = [step_of(twice, 4.0), step_of(once, 2.0), step_of(once, 3.0)]
    assert with_seconds_here(once, timed).step.seconds == pytest.approx(3.0)
    assert with_seconds_here(twice, timed).step.seconds == pytest.approx(4.0)


def test_a_step_in_another_type_tells_nothing(estimates):
    once, _, half = estimates
    assert half.cpu_work.dtype == "bfloat16"
    assert with_seconds_here(half, [step_of(once)]).step is None


def test_several_processes_share_the_cores():
    recipe = load_recipe("tiny", overrides=["distributed.num_processes=2", "distributed.strategy=ddp"])
    estimate = estimate_memory(recipe, "cpu")
    assert with_seconds_here(estimate, [step_of(estimate)]).step is None
