"""A recipe as the arguments of other people's trainers."""

from __future__ import annotations

import dataclasses

import pytest
from stock_scripts import CHECKPOINTING
from transformers import TrainingArguments

from lowmem_ft import hf, load_recipe
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.tested import is_before
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.trainers.shared_settings import SHARED_SETTINGS


@pytest.fixture
def tiny(tmp_path):
    def load(*overrides):
        return load_recipe(
            "tiny", [f"training.output_dir={tmp_path}/run", "training.use_cpu=true", *overrides]
        )

    return load


def test_each_row_of_the_table_is_of_a_key():
    assert {row.key for row in SHARED_SETTINGS} <= recipe_keys().keys()
    assert len({row.key for row in SHARED_SETTINGS}) == len(SHARED_SETTINGS)


def test_fields_of_the_table_are_fields_upstream(tiny):
    import trl

    recipe = tiny(
        "data.loss_on=assistant",
        "data.shuffle=false",
        "data.text_column=text",
        "data.num_proc=2",
        "data.chat_template=x",
    )
    classes = (TrainingArguments, trl.SFTConfig, trl.DPOConfig, trl.GRPOConfig)
    known = {field.name for one in classes for field in dataclasses.fields(one)}
    said = {name for row in SHARED_SETTINGS for name in row.fields(recipe)}
    assert len(said) > 30
    later = {"activation_checkpointing"} if is_before("transformers", (5, 23)) else set()
    assert said - known == later


def test_what_a_recipe_says_is_said_by_hfs_names(tiny):
    args = hf.training_arguments(
        tiny(
            "optimizer.betas=[0.8, 0.95]",
            "optimizer.weight_decay=0.1",
            "training.max_grad_norm=null",
            "training.lr_scheduler_type=cosine_with_min_lr",
            "training.lr_scheduler_kwargs={min_lr_rate: 0.1}",
            "training.save_steps=null",
            "data.group_by_length=true",
        )
    )
    assert (args.per_device_train_batch_size, args.gradient_accumulation_steps) == (4, 2)
    assert (args.adam_beta1, args.adam_beta2, args.weight_decay, args.optim) == (
        *(0.8, 0.95, 0.1),
        "adamw_torch_fused",
    )
    assert (args.max_grad_norm, args.lr_scheduler_kwargs) == (0, {"min_lr_rate": 0.1})
    assert (args.save_strategy, args.eval_strategy, args.eval_steps) == ("no", "steps", 7)
    assert args.train_sampling_strategy == "group_by_length"


def test_vertical_order_has_all_rows_of_a_step_in_a_batch(tiny):
    args = hf.training_arguments(tiny("accumulation.order=vertical"))
    assert (
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.per_device_eval_batch_size,
    ) == (8, 1, 4)


@pytest.mark.parametrize("make", [hf.training_arguments, hf.sft_config, hf.dpo_config])
def test_hfs_own_checkpointing_and_precision_stay_off(make, tiny):
    args = make(tiny("checkpointing.mode=full"))
    assert not args.gradient_checkpointing
    assert not args.bf16
    assert args.report_to == []


def test_trls_configs_have_what_is_said_of_the_data(tiny):
    args = hf.sft_config(tiny("data.packing=true", "data.loss_on=completion", "data.num_proc=2"))
    assert (args.max_length, args.packing, args.completion_only_loss, args.dataset_num_proc) == (
        128,
        True,
        True,
        2,
    )
    for make in (hf.dpo_config, hf.kto_config, hf.reward_config):
        assert make(tiny()).max_length == 128
    for make in (hf.grpo_config, hf.rloo_config):
        assert make(tiny("training.eval_steps=null"), num_generations=4).num_generations == 4
    assert hf.distillation_config(tiny(), max_completion_length=9).max_completion_length == 9


def test_an_override_wins_where_a_trainer_reads_it(tiny):
    args = hf.training_arguments(
        tiny("training.mixed_precision=bf16", "training.save_steps=null"),
        learning_rate=1e-3,
        bf16=False,
        save_steps=11,
    )
    assert (args.learning_rate, args.bf16, args.save_strategy, args.save_steps) == (1e-3, False, "steps", 11)


@pytest.mark.parametrize(
    "override,key",
    [
        ({"optim": "adafactor"}, "optimizer.name"),
        ({"gradient_checkpointing": True}, "checkpointing.mode"),
        ({CHECKPOINTING: True}, "checkpointing.mode"),
        ({"label_smoothing_factor": 0.1}, "loss.label_smoothing_factor"),
    ],
)
def test_an_override_of_what_attach_applies_is_refused(override, key, tiny):
    with pytest.raises(UserError, match=key):
        hf.training_arguments(tiny(), **override)


def test_hfs_checkpointing_is_the_scripts_own_where_the_recipe_has_none(tiny):
    args = hf.training_arguments(tiny("checkpointing.mode=none"), **{CHECKPOINTING: True})
    assert getattr(args, CHECKPOINTING)


def test_fields_that_do_not_exist_are_named_all_at_once(tiny):
    with pytest.raises(UserError) as caught:
        hf.training_arguments(tiny(), learning_rat=1.0, **{"optimizer.state": "8bit"})
    assert "learning_rate" in caught.value.problems[0]
    assert "load_recipe" in caught.value.problems[1]


@pytest.mark.parametrize(
    "setting", ["training.overwrite_output_dir=true", "budget.retry=false", "plan.mode=auto"]
)
def test_what_no_trainer_does_is_refused_by_name(setting, tiny):
    with pytest.raises(UserError, match=setting.partition("=")[0]):
        hf.training_arguments(tiny(setting))


def test_a_launchers_precision_against_the_recipes(tiny, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    for precision in ("bf16", "no"):
        with pytest.raises(UserError, match=f"mixed_precision={precision}.* has fp16"):
            hf.training_arguments(tiny(f"training.mixed_precision={precision}"))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # what `accelerate launch` sets unasked
    assert hf.training_arguments(tiny("training.mixed_precision=bf16")).bf16


def test_auto_resumes_from_the_newest_checkpoint(tiny, tmp_path):
    resumed = tiny("training.resume_from_checkpoint=auto")
    assert hf.training_arguments(resumed).resume_from_checkpoint is None
    (tmp_path / "run" / "checkpoint-7").mkdir(parents=True)
    assert hf.training_arguments(resumed).resume_from_checkpoint == str(tmp_path / "run" / "checkpoint-7")
