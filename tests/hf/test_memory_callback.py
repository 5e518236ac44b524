"""What a trainer's run needs and takes, said by a callback."""

from __future__ import annotations

import logging

import pytest
from stock_scripts import ProcessHere, trainer_of

from lowmem_ft import DoesNotFitError, hf
from lowmem_ft.foundation.budget import Budget
from lowmem_ft.planning.preflight import background_estimate


@pytest.fixture
def here(monkeypatch):
    monkeypatch.setattr(background_estimate, "EstimatingProcess", ProcessHere)


def test_estimated_in_background_measured_and_peaks_in_the_logs(here, tmp_path, caplog):
    callback = hf.MemoryCallback(budget="8GiB")
    trainer = trainer_of(
        tmp_path,
        callbacks=[callback],
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
    )
    with caplog.at_level(logging.INFO, "lowmem_ft"):
        trainer.train()
    assert "Estimated: " in caplog.text
    losses = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(entry["memory_peak_bytes"] > 0 for entry in losses)
    rows = {row.name: row for row in callback.rows()}
    assert {"in a step", "in evaluation", "while saving", "weights", "optimizer state"} <= rows.keys()
    assert rows["weights"].measured == rows["weights"].estimated
    assert rows["optimizer state"].error == pytest.approx(0, abs=0.01)  # torch counts its steps in tensors
    assert "in a step: estimated" in caplog.text


def test_a_run_above_its_budget_ends_before_its_first_step(here, tmp_path):
    trainer = trainer_of(tmp_path, callbacks=[hf.MemoryCallback(budget="16MiB")])
    with pytest.raises(DoesNotFitError, match=r"budget\.device=16MiB"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_a_budget_that_is_not_enforced_warns(here, tmp_path, caplog):
    trainer_of(tmp_path, callbacks=[hf.MemoryCallback(budget=Budget(device="16MiB", enforce=False))]).train()
    assert "more than budget.device=16MiB allows" in caplog.text


def test_a_script_that_no_recipe_describes_is_measured_all_the_same(tmp_path, caplog):
    callback = hf.MemoryCallback()
    with caplog.at_level(logging.INFO, "lowmem_ft"):
        trainer_of(tmp_path, callbacks=[callback], optim="adagrad").train()
    assert "could not be estimated" in caplog.text
    assert "optim=adagrad" in caplog.text
    assert callback.estimate is None
    assert "in a step: estimated -, measured" in caplog.text


def test_an_estimate_made_before_is_not_made_again(tmp_path, monkeypatch):
    from lowmem_ft import estimate_memory

    callback = hf.MemoryCallback()
    trainer = trainer_of(tmp_path, callbacks=[callback])
    estimate = estimate_memory(hf.recipe_from(trainer), "cpu")
    monkeypatch.delattr(background_estimate, "EstimatingProcess")
    callback.estimate = estimate
    trainer.train()
    assert callback.rows()[0].estimated == estimate.process_peak_bytes


def test_a_second_run_of_a_trainer_is_measured_anew(here, tmp_path):
    callback = hf.MemoryCallback()
    trainer = trainer_of(tmp_path, callbacks=[callback])
    trainer.train()
    first = callback.estimate
    trainer.train()
    assert callback.estimate is first
    assert callback.rows()[0].measured > 0
