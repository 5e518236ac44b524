"""A plan as a newcomer reads it: every line says what is so, and no more than 80 columns wide."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict
from lowmem_ft.foundation.units import GIB, MIB
from lowmem_ft.planning.planner.memory_plan import NOT_ESTIMATED, Counts, KnobChoice, MemoryPlan, Rejected
from lowmem_ft.recipe import load_recipe
from lowmem_ft.reports.plan_table import plan_table

RULE = (
    "optimizer.in_backward needs accumulation.order=vertical when gradient_accumulation_steps > 1, got 2 with "
    "horizontal. Set accumulation.order=vertical or optimizer.in_backward=false."
)
COUNTS = Counts(estimated=3, refused=40, beyond_bytes=0, beyond_seconds=7, left=0)


@pytest.fixture(scope="module")
def recipe():
    return load_recipe("tiny")


@pytest.fixture
def words_of(estimate, recipe, as_text):
    """What is printed of a plan, its lines joined."""

    def words(**fields) -> str:
        plan = MemoryPlan(**{"recipe": recipe, "estimate": estimate, "fits": True, "overrides": {}, **fields})
        lines = as_text(plan_table(plan, recipe), 80).splitlines()
        assert max(map(len, lines)) <= 80
        return " ".join(" ".join(lines).split())

    return words


def test_a_rule_is_told_without_what_was_seen_and_ways_out(words_of):
    knobs = (KnobChoice(setting="x", cheaper="accumulation.order=horizontal", reason=RULE),)
    told = words_of(knobs=knobs)
    assert "optimizer.in_backward needs accumulation.order=vertical" in told
    assert "when gradient_accumulation_steps > 1" in told
    assert "got 2" not in told
    assert "Set " not in told


def test_knobs_that_the_search_did_not_reach_are_told_once(words_of):
    known = KnobChoice(setting="x", cheaper="tiling.mlp=1", reason="3.00 MiB too much for the device")
    unknown = [KnobChoice(setting="x", cheaper=f"tiling.head={i}", reason=NOT_ESTIMATED) for i in (1, 2, 3)]
    told = words_of(knobs=(known, *unknown), interrupted=True)
    assert told.count(NOT_ESTIMATED) == 1
    assert "the others not estimated" in told
    assert "tiling.head" not in told
    assert "that were rejected" not in words_of(knobs=tuple(unknown), interrupted=True)


def test_without_a_clock_nothing_is_said_of_seconds(words_of, estimate):
    on_cpu = dataclasses.replace(
        estimate, step=None, gpu=dataclasses.replace(estimate.gpu, name="cpu (x86_64)")
    )
    told = words_of(estimate=on_cpu, counts=COUNTS)
    assert "There is no timing model for this device" in told
    assert "7 with more or costlier changes." in told
    assert "products" not in told
    assert "7 too slow in matrix products" in words_of(counts=COUNTS)


def test_another_plan_is_told_by_its_own_settings(words_of, recipe):
    chosen = dataclasses.replace(recipe, checkpointing=dataclasses.replace(recipe.checkpointing, mode="none"))
    told = words_of(
        recipe=chosen,
        overrides={"checkpointing.mode": "none"},
        rejected=(Rejected(overrides={"tiling.mlp": 4}, reason="3.00 MiB too much for the device"),),
    )
    assert "3.00 MiB too much for the device checkpointing.mode=full, tiling.mlp=4" in told


def does_not_fit(recipe, **offload) -> dict:
    return {
        "fits": False,
        "recipe": dataclasses.replace(recipe, offload=dataclasses.replace(recipe.offload, **offload)),
    }


def test_a_shortfall_of_mebibytes_is_told_in_mebibytes(words_of, recipe):
    assert "lacks 22.0 MiB of device memory" in words_of(
        **does_not_fit(recipe), missing_device_bytes=22 * MIB
    )


def test_a_disk_is_offered_for_what_waits_on_the_host(words_of, recipe):
    missing = {"missing_host_bytes": GIB}
    assert "offload.folder" not in words_of(**does_not_fit(recipe), **missing)
    assert "offload.folder=FOLDER" in words_of(**does_not_fit(recipe, optimizer="host"), **missing)


def test_a_plan_of_full_fine_tuning_says_first_that_the_adapters_it_may_use_are_not_needed(words_of, recipe):
    allowed = dataclasses.replace(recipe, plan=dataclasses.replace(recipe.plan, allow=("lora",)))
    told = words_of(recipe=allowed)
    assert told.startswith("Full fine-tuning, as it fits: plan.allow=[lora] is for where nothing else does")
    with_adapter = dataclasses.replace(allowed, adapter=dataclasses.replace(recipe.adapter, name="lora"))
    assert "Full fine-tuning" not in words_of(recipe=with_adapter)
    assert "Full fine-tuning" not in words_of()


def test_words_that_were_allowed_are_not_offered_again(words_of, recipe):
    allowed = dataclasses.replace(recipe, plan=dataclasses.replace(recipe.plan, allow=("lora",)))
    told = words_of(fits=False, recipe=allowed, missing_device_bytes=GIB)
    assert "The changes that plan.allow names do not make it fit: lora." in told
    assert "lets a plan change the mathematics" not in told
    stopped = words_of(fits=False, recipe=allowed, missing_device_bytes=GIB, interrupted=True)
    assert "do not make it fit" not in stopped
    assert "plan.allow=[lora,qlora] lets a plan change the mathematics" in words_of(
        fits=False, missing_device_bytes=GIB
    )


def test_the_nearest_is_told_once_and_what_is_left_may_fit(words_of, estimate):
    limited = dataclasses.replace(estimate, budget=BudgetVerdict(device_bytes=GIB, host_bytes=None))
    told = words_of(
        estimate=limited,
        fits=False,
        missing_device_bytes=GIB,
        counts=dataclasses.replace(COUNTS, left=9),
        rejected=(Rejected(overrides={}, reason="1.00 GiB too much for the device"),),
    )
    assert "Nearest plans that do not fit" not in told
    assert "9 were left: one of them may fit." in told
