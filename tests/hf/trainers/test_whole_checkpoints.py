"""Checkpoints of a trainer that are whole or not there."""

from __future__ import annotations

import logging
import shutil

import pytest
from attached_trainers import attached_trainer, recipe_of, trainer_of
from tiny_models import SIZES, model_of
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.trainer_utils import get_last_checkpoint

from lowmem_ft import hf
from lowmem_ft.foundation.errors import UserError

EVERY_STEP = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_save_that_fails_leaves_the_checkpoint_before_as_the_last(tmp_path):
    trainer, _, _ = attached_trainer(tmp_path, fields=EVERY_STEP)
    save_scaler = trainer._save_scaler

    def disk_full(output_dir):
        save_scaler(output_dir)
        if trainer.state.global_step == 2:
            assert output_dir.endswith("checkpoint-2.incomplete")
            raise OSError("No space left on device")

    trainer._save_scaler = disk_full
    with pytest.raises(OSError, match="No space left"):
        trainer.train()
    assert names(tmp_path) == ["checkpoint-1"]


def test_what_a_trainer_writes_is_what_it_writes_alone(tmp_path):
    trainer_of(tmp_path / "alone", fields=EVERY_STEP)[0].train()
    attached_trainer(tmp_path / "attached", fields=EVERY_STEP)[0].train()
    assert names(tmp_path / "attached") == names(tmp_path / "alone")
    for folder in names(tmp_path / "alone"):
        assert names(tmp_path / "attached" / folder) == names(tmp_path / "alone" / folder)


def test_a_run_goes_on_over_its_own_later_checkpoints_and_keeps_the_best(tmp_path):
    """One that a killed process was writing is not counted among the two that stay."""
    fields = {
        **EVERY_STEP,
        "learning_rate": 1.0,  # each step is worse
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
    }
    attached_trainer(tmp_path, fields={**fields, "save_total_limit": None})[0].train()
    (tmp_path / "checkpoint-2" / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "checkpoint-3", tmp_path / "checkpoint-7.incomplete")
    trainer, _, _ = attached_trainer(tmp_path, fields=fields)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")


def test_the_best_is_known_in_its_own_checkpoint(tmp_path):
    fields = {
        **EVERY_STEP,
        "max_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
    }
    trainer, _, _ = attached_trainer(tmp_path, fields=fields)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-1")
    assert (
        '"best_model_checkpoint": null' not in (tmp_path / "checkpoint-1" / "trainer_state.json").read_text()
    )


def test_a_checkpoint_that_was_cut_short_without_us_is_named_with_the_one_before(tmp_path):
    attached_trainer(tmp_path, fields=EVERY_STEP)[0].train()
    (tmp_path / "checkpoint-3" / "trainer_state.json").unlink()
    assert get_last_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-3"), "transformers takes it"
    trainer, _, _ = attached_trainer(tmp_path, fields=EVERY_STEP)
    with pytest.raises(UserError, match=r"writes trainer_state.json last .* resume from .*checkpoint-2\."):
        trainer.train(resume_from_checkpoint=True)


def test_experts_that_are_saved_one_by_one_are_gone_on_from_and_are_the_best_models(tmp_path):
    """transformers leaves them as they are, with a warning (5.23): their files have other names than the model."""
    fields = {
        **EVERY_STEP,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }

    def trained(**resumed):
        model = model_of(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4))
        trainer, meter = trainer_of(tmp_path, model=model, fields=fields)
        hf.attach(trainer, recipe_of())
        trainer.train(**resumed)
        best = MixtralForCausalLM.from_pretrained(trainer.state.best_model_checkpoint).state_dict()
        assert all(value.equal(best[name]) for name, value in model.state_dict().items())
        last = MixtralForCausalLM.from_pretrained(tmp_path / "checkpoint-3").state_dict()
        return meter.losses, last

    losses, weights = trained()
    rest, again = trained(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert rest == losses[1:]
    assert all(weights[name].equal(again[name]) for name in weights)


def test_weights_without_the_optimizers_state_are_gone_on_from_with_a_warning(tmp_path, caplog):
    fields = {**EVERY_STEP, "max_steps": 1}
    attached_trainer(tmp_path, fields={**fields, "save_only_model": True})[0].train()
    trainer, _, _ = attached_trainer(tmp_path, fields=fields)
    with caplog.at_level(logging.WARNING, "lowmem_ft"):
        trainer.train(resume_from_checkpoint=True)
    assert "checkpoint-1 has weights but no optimizer state" in caplog.text
