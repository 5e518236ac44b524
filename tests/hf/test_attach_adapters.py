"""PEFT's adapters other than LoRA under a recipe: trained as they are alone, or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from attached_trainers import IN_ONE_BATCH, SAME_LOSSES, VERTICAL, problems_of, recipe_of, trainer_of
from peft import get_peft_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from sweeps import few_quick
from tiny_models import tiny_llama

from lowmem_ft import hf
from lowmem_ft.hf.trainers.agreement import PASSED_THROUGH

SETTINGS: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 6, "target_r": 4, "total_step": 20},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 8},
    "FOURIERFT": {"n_frequency": 16},
    "IA3": {"feedforward_modules": ["down_proj"]},
    "MISS": {"r": 4},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "OFT": {"oft_block_size": 8, "r": 0},
    "SHIRA": {"r": 2},
    "VBLORA": {"num_vectors": 16, "vector_length": 4},
    "WAVEFT": {"n_frequency": 16},
    **{kind: {"num_virtual_tokens": 4} for kind in ("PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING")},
}
"""What PEFT's defaults lack for so small a model."""


def adapted(kind):
    """A model with one kind of PEFT's adapters, the same each time."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    chosen = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    takes_modules = "target_modules" in inspect.signature(config).parameters
    settings = {**(chosen if takes_modules else {}), **SETTINGS.get(kind, {})}
    model = tiny_llama()
    torch.manual_seed(3)
    return get_peft_model(model, config(task_type="CAUSAL_LM", **settings))


def losses(folder, kind, *settings, fields):
    trainer, meter = trainer_of(folder, model=adapted(kind), fields=fields)
    if settings:
        handle = hf.attach(trainer, recipe_of(*settings))
        assert f"PEFT's {kind}, as it is" in handle.applied
    trainer.train()
    return meter.losses


IN_PLACE = ("loss.chunk_tokens=8", "checkpointing.mode=full", "offload.activations=inputs", "tiling.mlp=2")


@pytest.mark.parametrize(
    "kind", few_quick(sorted(PASSED_THROUGH), ("IA3", "LOHA", "OFT", "PROMPT_TUNING", "VERA"))
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")
def test_other_adapters_train_as_they_do_alone(kind, tmp_path):
    if kind not in PEFT_TYPE_TO_CONFIG_MAPPING:
        pytest.skip("this PEFT does not have it")
    alone = losses(tmp_path, kind, fields={})
    assert losses(tmp_path, kind, *IN_PLACE, fields={}) == pytest.approx(alone, abs=SAME_LOSSES)
    if kind != "PVERA":  # which draws random numbers, and in another order there
        alone = losses(tmp_path, kind, fields=IN_ONE_BATCH)
        in_turn = losses(tmp_path, kind, *VERTICAL, "optimizer.in_backward=true", fields=IN_ONE_BATCH)
        assert in_turn == pytest.approx(alone, abs=SAME_LOSSES)


def test_keys_in_a_cache_are_refused_by_name(tmp_path):
    trainer, _ = trainer_of(tmp_path, model=adapted("PREFIX_TUNING"))
    assert problems_of(trainer) == (
        "hf.attach() supports PEFT's LoRA, got PREFIX_TUNING. Train other adapters without it.",
    )


def test_a_recipe_that_asks_for_lora_is_told_of_the_other(tmp_path):
    trainer, _ = trainer_of(tmp_path, model=adapted("VERA"))
    (problem,) = problems_of(trainer, "adapter.name=lora", "adapter.r=4")
    assert "the trainer's has PEFT's VERA. Leave adapter.* out of the recipe." in problem
