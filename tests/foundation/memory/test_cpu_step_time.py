"""An estimate for a processor has seconds once a step was timed on it."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft import estimate_memory
from lowmem_ft.foundation.memory.cpu_step_time import (
    NO_SECONDS,
    OTHER_SHARE,
    SAME_SHARE,
    TimedStep,
    with_seconds,
)
from lowmem_ft.recipe import load_recipe


@pytest.fixture(scope="module")
def estimates():
    """Return estimates for a processor: as the recipe is, with twice the micro-batches, and in bfloat16."""
    settings = ((), ("training.gradient_accumulation_steps=4",), ("model.dtype=bfloat16",))
    return [estimate_memory(load_recipe("tiny", overrides=each), "cpu") for each in settings]


def step_of(estimate, seconds=2.0, **changes):
    work = estimate.cpu_work
    step = TimedStep(work=work, tokens=work.tokens, seconds=seconds, model="a model", date="2026-11-27")
    return dataclasses.replace(step, **changes)


def test_without_a_timed_step_the_estimate_says_how_to_get_one(estimates):
    assert NO_SECONDS in estimates[0].not_modelled
    estimate = with_seconds(estimates[0], [], 1)
    assert estimate.step is None
    assert (
        "timed a step in float32 with 1 thread yet (training.max_steps=2 is enough)"
        in estimate.not_modelled[0]
    )


def test_the_same_step_takes_what_it_took(estimates):
    estimate = with_seconds(estimates[0], [step_of(estimates[0])], 2)
    assert estimate.step.seconds == pytest.approx(2.0)
    assert estimate.step.tokens_per_second == pytest.approx(estimate.step.tokens / 2)
    assert estimate.step.high_seconds == pytest.approx(2.0 * (1 + SAME_SHARE))
    assert not any(NO_SECONDS in text for text in estimate.not_modelled)
    assert "took 2 s on this processor (2 threads, float32, 2026-11-27)" in estimate.choices[-1]


def test_a_step_of_shorter_rows_tells_less(estimates):
    short = step_of(estimates[0], tokens=0.7 * estimates[0].cpu_work.tokens)
    assert with_seconds(estimates[0], [short], 2).step.high_seconds > 2.9


def test_another_mix_of_the_same_total_is_another_step(estimates):
    work = estimates[0].cpu_work
    more_bytes = dataclasses.replace(
        work,
        num_bytes=work.num_bytes + 1e10 * 1e-5 * 0.5 * work.num_operators,
        num_operators=0.5 * work.num_operators,
    )
    assert more_bytes.reference_seconds == pytest.approx(work.reference_seconds)
    step = with_seconds(estimates[0], [step_of(estimates[0], work=more_bytes)], 2).step
    assert step.high_seconds == pytest.approx((1 + OTHER_SHARE) * step.seconds)


def test_twice_the_micro_batches_take_nearly_twice_as_long(estimates):
    once, twice, _ = estimates
    step = with_seconds(twice, [step_of(once)], 2).step
    assert 3.0 < step.seconds < 4.0  # the optimizer's step stays one
    assert step.high_seconds > 1.4 * step.seconds


def test_the_nearest_step_counts_and_the_youngest_of_equals(estimates):
    once, twice, _ = estimates
    timed = [step_of(twice, 4.0), step_of(once, 2.0), step_of(once, 3.0)]
    assert with_seconds(once, timed, 2).step.seconds == pytest.approx(3.0)
    assert with_seconds(twice, timed, 2).step.seconds == pytest.approx(4.0)


def test_a_step_in_another_type_tells_nothing(estimates):
    once, _, half = estimates
    assert half.cpu_work.dtype == "bfloat16"
    assert with_seconds(half, [step_of(once)], 2).step is None


def test_several_processes_share_the_cores():
    recipe = load_recipe("tiny", overrides=["distributed.num_processes=2", "distributed.strategy=ddp"])
    estimate = estimate_memory(recipe, "cpu")
    assert with_seconds(estimate, [step_of(estimate)], 2) is estimate
