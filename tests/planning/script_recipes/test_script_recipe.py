"""The recipe of somebody's script, and what it says of the memory that the script takes."""

from __future__ import annotations

import dataclasses
import gc
import logging
import re
import sys
from pathlib import Path

import pytest
import torch
from stock_scripts import CHECKPOINTING, TOKENS, arguments, trainer_of
from tiny_models import tiny_llama
from transformers import AutoTokenizer, TrainerCallback

from lowmem_ft import estimate_memory, hf, load_recipe
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.foundation.upstream.tested import is_before
from lowmem_ft.planning.script_recipes.trl_loss import _tile_shape, trl_loss
from lowmem_ft.planning.script_recipes.untranslated import Reading
from lowmem_ft.recipe.reading.keys import recipe_keys

ROOT = Path(__file__).parents[3]
BY_TOKENS = is_before("trl", (1, 15))
"""Whether TRL's loss has all logits of some tokens at once, not tiles of them."""


class Meter(TrainerCallback):
    """The most that tensors take in each step, weights included."""

    def __init__(self):
        self.peaks = []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.tracker = StorageTracker()
        for tensor in [*model.parameters(), *model.buffers()]:
            self.tracker.add(tensor)
        self.tracker.__enter__()

    def on_step_begin(self, *args, **kwargs):
        gc.collect()
        self.tracker.reset_peak()

    def on_step_end(self, *args, **kwargs):
        self.peaks.append(self.tracker.peak_bytes)

    def on_train_end(self, *args, **kwargs):
        self.tracker.__exit__(None, None, None)


@pytest.mark.parametrize(
    "fields",
    [{}, {"gradient_accumulation_steps": 2}, {CHECKPOINTING: True}],
    ids=["plain", "accumulated", "checkpointed"],
)
def test_the_estimate_is_what_the_scripts_step_takes(fields, tmp_path):
    trainer = trainer_of(tmp_path, **fields)
    estimate = estimate_memory(hf.recipe_from(trainer), "cpu")
    meter = Meter()
    trainer.add_callback(meter)
    trainer.train()
    assert estimate.allocated_peak_bytes == pytest.approx(meter.peaks[-1], rel=0.01)


def test_the_estimate_of_adapters_and_autocast(tmp_path):
    import peft

    model = tiny_llama(vocab_size=512, max_position_embeddings=2 * TOKENS)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    trainer = trainer_of(tmp_path, model=model, bf16=True)
    recipe = hf.recipe_from(trainer)
    assert (recipe.adapter.name, recipe.adapter.r, recipe.adapter.target_modules) == (
        *("lora", 4),
        ("q_proj", "v_proj"),
    )
    meter = Meter()
    estimate = estimate_memory(recipe, "cpu")
    trainer.add_callback(meter)
    trainer.train()
    assert estimate.allocated_peak_bytes == pytest.approx(meter.peaks[-1], rel=0.02)


def test_adapters_beside_all_linear_layers_are_called_so(tmp_path):
    import peft

    model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(target_modules="all-linear", use_rslora=True))
    adapter = hf.recipe_from(arguments(tmp_path), model, max_length=8).adapter
    assert (adapter.target_modules, adapter.use_rslora) == (("all-linear",), True)


ROUND_TRIP = (
    "training.per_device_train_batch_size=2",
    "training.gradient_accumulation_steps=3",
    "training.per_device_eval_batch_size=5",
    "training.learning_rate=3e-4",
    "training.lr_scheduler_type=cosine_with_min_lr",
    "training.lr_scheduler_kwargs={min_lr_rate: 0.1}",
    "training.warmup_steps=0.1",
    "training.max_steps=17",
    "training.max_grad_norm=null",
    "training.mixed_precision=bf16",
    "training.seed=7",
    "training.save_steps=9",
    "optimizer.betas=[0.8, 0.95]",
    "optimizer.eps=1e-6",
    "optimizer.weight_decay=0.1",
    "data.packing=true",
)


def test_arguments_of_a_recipe_give_its_fields_back(tmp_path):
    recipe = load_recipe(
        "tiny",
        [
            f"training.output_dir={tmp_path}",
            "training.use_cpu=true",
            "training.eval_steps=null",
            "loss.chunk_tokens=null",
            *ROUND_TRIP,
        ],
    )
    back = hf.recipe_from(hf.sft_config(recipe), recipe.model.name_or_path)
    keys = [setting.partition("=")[0] for setting in ROUND_TRIP] + ["data.max_length", "optimizer.name"]
    assert {key: recipe_keys()[key].value_in(back) for key in keys} == {
        key: recipe_keys()[key].value_in(recipe) for key in keys
    }


@pytest.mark.parametrize(
    "optim,name",
    [
        *(("adamw_torch", "adamw"), ("adamw_8bit", "adamw_bnb_8bit"), ("paged_adamw_8bit",) * 2),
        *(("adafactor", "adafactor"), ("lion_32bit", "lion_32bit")),
    ],
)
def test_optimizers_by_their_names(optim, name, tmp_path):
    recipe = hf.recipe_from(arguments(tmp_path, optim=optim), tiny_llama(), max_length=8)
    assert recipe.optimizer.name == name


def test_sgd_has_no_momentum_unless_the_script_says_so(tmp_path):
    for optim_args, momentum in ((None, 0.0), ("momentum=0.8", 0.8)):
        args = arguments(tmp_path, optim="sgd", optim_args=optim_args)
        config = hf.recipe_from(args, tiny_llama(), max_length=8).optimizer
        assert config.hyperparameters()["momentum"] == momentum


def test_an_optimizer_that_no_recipe_has_is_named(tmp_path):
    with pytest.raises(UserError, match="optim=adagrad"):
        hf.recipe_from(arguments(tmp_path, optim="adagrad"), tiny_llama(), max_length=8)
    trainer = trainer_of(tmp_path)
    trainer.optimizer = torch.optim.RMSprop(trainer.model.parameters())
    with pytest.raises(UserError, match="RMSprop"):
        hf.recipe_from(trainer)


def test_bfloat16_weights_under_torchs_adamw_have_no_masters(tmp_path):
    optimizer = hf.recipe_from(arguments(tmp_path), tiny_llama(torch.bfloat16), max_length=8).optimizer
    assert (optimizer.master, optimizer.state) == ("none", "bf16")


def test_what_a_recipe_cannot_say_is_said_with_its_consequence(tmp_path, caplog):
    fields = {
        "auto_find_batch_size": True,
        "label_smoothing_factor": 0.1,
        "lr_scheduler_type": "reduce_lr_on_plateau",
    }
    with caplog.at_level(logging.WARNING, "lowmem_ft"):
        args = arguments(tmp_path, **fields, eval_strategy="epoch")
        hf.recipe_from(args, tiny_llama(), max_length=8)
    assert all(name in caplog.text for name in fields)


def test_ligers_operators_are_the_recipes_and_its_loss_is_said(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "lowmem_ft"):
        recipe = hf.recipe_from(arguments(tmp_path, use_liger_kernel=True), tiny_llama(), max_length=8)
    assert recipe.model.kernels == "auto"
    assert "use_liger_kernel=True also replaces the loss" in caplog.text


@pytest.mark.parametrize(
    "fields", [{"lr_scheduler_type": "constant"}, {"lr_scheduler_type": "linear"}, {"eval_on_start": True}]
)
def test_a_schedule_that_hf_lets_pass_is_read(fields, tmp_path):
    args = arguments(tmp_path, warmup_steps=10, max_steps=2, **fields)
    assert hf.recipe_from(args, tiny_llama(), max_length=8).training.warmup_steps <= 2


def test_what_would_make_the_recipe_wrong_is_an_error_all_at_once(tmp_path):
    import peft

    model = peft.get_peft_model(
        tiny_llama(),
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], bias="lora_only"),
    )
    with pytest.raises(UserError) as caught:
        hf.recipe_from(arguments(tmp_path, optim="adagrad"), model, max_length=8)
    text = str(caught.value)
    assert all(name in text for name in ("modules_to_save", "bias='lora_only'", "optim=adagrad"))
    frozen = tiny_llama()
    frozen.model.embed_tokens.requires_grad_(False)
    with pytest.raises(UserError, match="frozen without adapters"):
        hf.recipe_from(arguments(tmp_path), frozen, max_length=8)


def test_the_length_of_rows_comes_from_the_data_or_is_asked_for(tmp_path):
    trainer = trainer_of(tmp_path)
    assert hf.recipe_from(trainer).data.max_length == TOKENS
    assert hf.recipe_from(trainer, max_length=32).data.max_length == 32
    with pytest.raises(UserError, match="max_length="):
        hf.recipe_from(arguments(tmp_path), tiny_llama())


def test_a_checkpoint_in_a_folder_keeps_its_name_until_its_config_is_changed(tmp_path, caplog):
    tiny_llama().save_pretrained(tmp_path / "model")
    model = type(tiny_llama()).from_pretrained(tmp_path / "model")
    found = hf.recipe_from(arguments(tmp_path), model, max_length=8).model
    assert (found.name_or_path, found.weights) == (str(tmp_path / "model"), "pretrained")
    model.resize_token_embeddings(72)
    changed = hf.recipe_from(arguments(tmp_path), model, max_length=8)
    assert changed.model.weights == "random"
    assert "a copy of the current architecture" in caplog.text
    assert estimate_memory(changed, "cpu").by_category_at_peak["parameter"] == sum(
        tensor.numel() * 4 for tensor in [*model.parameters(), *model.buffers()]
    )


def test_trainers_that_do_more_in_a_step_are_refused_by_name(tmp_path):
    import trl

    args = trl.DPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{CHECKPOINTING: False})
    with pytest.raises(UserError, match=r"DPOConfig.*`lowmem-ft estimate --script train\.py`"):
        hf.recipe_from(args, tiny_llama())


def test_the_refusal_has_the_command_for_this_very_script(tmp_path, monkeypatch):
    import trl

    monkeypatch.setattr(sys, "argv", ["my dpo.py", "--lr", "1e-6"])
    args = trl.GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **{CHECKPOINTING: False})
    with pytest.raises(UserError, match=re.escape("`lowmem-ft estimate --script 'my dpo.py' -- --lr 1e-6`")):
        hf.recipe_from(args, tiny_llama())


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_quantised_weights_under_adapters(quantization, tmp_path, caplog):
    pytest.importorskip("bitsandbytes")
    tiny_llama(hidden_size=64, intermediate_size=128).save_pretrained(tmp_path / "model")
    settings = [
        f"model={tmp_path / 'model'}",
        *(f"model.quantization={quantization}", "model.dtype=bfloat16", "adapter.name=lora", "adapter.r=4"),
        *("training.use_cpu=true", "model.weights=pretrained", "data.max_length=32"),
    ]
    recipe = load_recipe("tiny", settings)
    model = hf.prepare_model(str(tmp_path / "model"), recipe)
    caplog.clear()
    found = hf.recipe_from(arguments(tmp_path), model, max_length=32)
    assert (found.model.quantization, found.model.dtype, found.adapter.r) == (quantization, "bfloat16", 4)
    assert found.model.name_or_path == str(tmp_path / "model")
    assert caplog.text == ""  # nothing is left out


def test_trls_sft_with_rows_as_long_as_they_are_and_a_head_in_tiles(tmp_path, caplog):
    import datasets
    import trl

    rows = datasets.Dataset.from_list(
        [{"input_ids": [5] * length, "labels": [5] * length} for length in (9, 21, 14)]
    )
    args = trl.SFTConfig(
        str(tmp_path),
        max_length=64,
        per_device_train_batch_size=2,
        pad_to_multiple_of=8,
        use_cpu=True,
        bf16=False,
        report_to=[],
        **{CHECKPOINTING: True},
    )
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    trainer = trl.SFTTrainer(
        tiny_llama(vocab_size=512), args=args, train_dataset=rows, processing_class=tokenizer
    )
    recipe = hf.recipe_from(trainer)
    assert (recipe.data.max_length, recipe.checkpointing.mode) == (24, "full")
    assert recipe.loss.chunk_tokens == 48  # all of a batch: a tile is larger
    if not BY_TOKENS:
        assert "TRL's loss takes 6.68 MiB" in caplog.text  # on a CPU, mostly copies of a tile in torch
    assert estimate_memory(recipe, "cpu").by_category_at_peak["parameter"] > 0


@pytest.mark.skipif(not BY_TOKENS, reason="TRL works on tiles from 1.15 on")
def test_a_chunk_is_trls_own_where_it_has_no_tiles():
    recipe = load_recipe("tiny", ["data.max_length=512", "training.per_device_train_batch_size=1"])
    reading = Reading()
    assert trl_loss(recipe, 49_152, reading).chunk_tokens == 256
    assert not reading.warnings


@pytest.mark.skipif(BY_TOKENS, reason="TRL has tiles from 1.15 on")
def test_a_tile_of_trls_is_what_its_source_says():
    import inspect

    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    tokens, vocabulary = _tile_shape()
    assert (tokens, vocabulary) == (4096, 32768)  # as docs/hf_projects.md has it
    head = inspect.getsource(chunked_logprob.ChunkedLogProbFunction)
    assert (
        head.count("torch.empty((min(N, TOKEN_CHUNK_SIZE), chunk_size)") == 2
    )  # forward and backward, one each
    assert "_CHUNKED_LOGPROB_CHUNK_SIZE," in inspect.getsource(utils.add_fused_lm_head)


@pytest.mark.skipif(BY_TOKENS, reason="TRL has tiles from 1.15 on")
@pytest.mark.parametrize(
    "vocabulary, rows, dtype, chunk_tokens",
    [
        (49_152, 8192, "bfloat16", round(4096 * 32_768 * 2 / (6 * 49_152))),
        (49_152, 8192, "float32", round(4096 * 32_768 / 49_152)),
        (512, 64, "bfloat16", 64),  # a tile is wider than all logits
    ],
)
def test_a_chunk_of_ours_takes_the_bytes_of_trls_tile(vocabulary, rows, dtype, chunk_tokens):
    recipe = load_recipe("tiny", ["training.per_device_train_batch_size=1", "training.use_cpu=false"])
    recipe = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, max_length=rows),
        model=dataclasses.replace(recipe.model, dtype=dtype),
        training=dataclasses.replace(recipe.training, mixed_precision="no"),
    )
    reading = Reading()
    assert trl_loss(recipe, vocabulary, reading).chunk_tokens == chunk_tokens
    assert bool(reading.warnings) == (vocabulary == 512)
