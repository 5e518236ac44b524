"""The memory knobs of somebody's script, chosen for a budget."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
from stock_scripts import CHECKPOINTING, ProcessHere, trainer_of

from lowmem_ft import UserError, estimate_memory, hf
from lowmem_ft.hf.trainers import attaching
from lowmem_ft.planning.preflight import plan_first
from lowmem_ft.planning.script_recipes.script_plan import plan_for
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.trainers.trainer_kinds import DECIDED_BY_A_TRAINER
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig


@pytest.fixture(autouse=True)
def _process_here(monkeypatch):
    monkeypatch.setattr(plan_first, "EstimatingProcess", ProcessHere)


def decided(recipe):
    return {
        path: key.value_in(recipe)
        for path, key in recipe_keys().items()
        if path in DECIDED_BY_A_TRAINER or path.partition(".")[0] in DECIDED_BY_A_TRAINER
    }


def test_what_fits_is_left_as_it_is(tmp_path):
    trainer = trainer_of(tmp_path)
    found = plan_for(trainer, "4GiB")
    assert (found.overrides, found.recipe.plan.mode, found.recipe.budget.device) == ({}, "none", "4GiB")


@pytest.mark.slow
def test_a_plan_changes_what_a_trainer_has_not_settled(tmp_path):
    trainer = trainer_of(tmp_path, per_device_train_batch_size=512)
    recipe = hf.recipe_from(trainer)
    as_it_is = estimate_memory(recipe, "cpu")
    found = plan_for(trainer, f"{as_it_is.process_peak_bytes * 3 // 4}B")
    assert found.estimate.process_peak_bytes < as_it_is.process_peak_bytes * 3 // 4
    assert found.overrides
    assert decided(found.recipe) | {"model.name_or_path": ""} == decided(recipe) | {"model.name_or_path": ""}


def test_a_budget_that_cannot_be_had_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"budget\.device=16MiB"):
        plan_for(trainer_of(tmp_path), "16MiB")


def test_attached_as_planned_with_the_scripts_own_checkpointing_taken_over(tmp_path, caplog):
    trainer = trainer_of(tmp_path, **{CHECKPOINTING: True})
    with caplog.at_level(logging.INFO, "lowmem_ft.hf"):
        attached = hf.attach(trainer, plan="auto", budget="4GiB")
    assert attached.differences == ()
    assert "differ" not in caplog.text
    assert "acts on" not in caplog.text
    assert (
        attached.recipe.checkpointing.mode == "full"
    )  # it fits as it is; a CPU has no clock to tell better by
    assert attached.recipe.budget.device == "4GiB"
    assert not getattr(trainer.args, CHECKPOINTING)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    attached.remove()
    assert getattr(trainer.args, CHECKPOINTING)
    stock = trainer_of(tmp_path, **{CHECKPOINTING: True})
    stock.train()
    assert losses == pytest.approx(
        [entry["loss"] for entry in stock.state.log_history if "loss" in entry], abs=1e-5
    )


def test_a_plan_without_checkpointing_is_not_overruled_by_the_scripts_flag(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, **{CHECKPOINTING: True})
    recipe = hf.recipe_from(trainer)
    chosen = dataclasses.replace(recipe, checkpointing=CheckpointingConfig(mode="none"))
    monkeypatch.setattr(attaching, "plan_for", lambda trainer, budget: SimpleNamespace(recipe=chosen))
    assert hf.attach(trainer, plan="auto").recipe.checkpointing.mode == "none"


@pytest.mark.parametrize("how", [{}, {"plan": "auto", "recipe": 1}, {"recipe": 1, "budget": "4GiB"}])
def test_a_recipe_or_a_plan_is_attached_and_not_both(how, tmp_path):
    trainer = trainer_of(tmp_path)
    if "recipe" in how:
        how = {**how, "recipe": hf.recipe_from(trainer)}
    with pytest.raises(UserError, match="takes a recipe, or plan='auto'"):
        hf.attach(trainer, **how)
