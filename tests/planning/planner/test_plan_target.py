"""What a plan's target refuses before it is built, against what building refuses."""

from __future__ import annotations

import pytest
from transformers import Qwen3MoeConfig

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.planning.estimator.estimate import estimate_memory
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.recipe import load_recipe

LORA_OF_EXPERTS = ("adapter.name=lora", "adapter.r=2", "adapter.target_parameters=[gate_up_proj,down_proj]")


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("experts")
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
    }
    of_experts = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    Qwen3MoeConfig(**sizes, **of_experts, num_hidden_layers=12, max_position_embeddings=64).save_pretrained(
        folder
    )
    return str(folder)


def recipe_for(folder: str, *settings: str):
    return load_recipe(None, [f"model={folder}", "model.weights=random", "data.max_length=16", *settings])


@pytest.mark.parametrize("parameters", ["stream", "device"])
@pytest.mark.parametrize(
    "checkpointing",
    [
        ["checkpointing.mode=none"],
        ["checkpointing.mode=full"],
        ["checkpointing.mode=selective"],
        ["checkpointing.mode=full", "checkpointing.skip_last_layers=2"],
    ],
)
def test_streamed_experts_without_checkpointing_are_refused_before_they_are_built(
    experts, parameters, checkpointing
):
    recipe = recipe_for(
        experts, *LORA_OF_EXPERTS, "model.dtype=bfloat16", f"offload.parameters={parameters}", *checkpointing
    )
    asked = recipe_for(experts, *LORA_OF_EXPERTS, "model.dtype=bfloat16")
    refused = [problem for rule in Target.of(asked, "l4").rules for problem in rule.problems(recipe)]
    try:
        estimate_memory(recipe, "l4")
    except ModelError:
        assert any("holds the weights of several experts" in problem for problem in refused)
    else:
        assert not refused


def test_the_recipes_own_number_of_layers_left_alone_may_stay(experts):
    own = [*LORA_OF_EXPERTS, "model.dtype=bfloat16", "offload.parameters=stream", "offload.resident_layers=4"]
    recipe = recipe_for(experts, *own, "checkpointing.mode=full", "checkpointing.skip_last_layers=2")
    assert not [problem for rule in Target.of(recipe, "l4").rules for problem in rule.problems(recipe)]
    assert estimate_memory(recipe, "l4").step is not None
