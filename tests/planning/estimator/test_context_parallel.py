"""The estimate of a process that has some tokens of each row: its memory, what the ring sends, and its speed."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.traces.tracing import trace_layers
from lowmem_ft.recipe import load_recipe
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

SETTINGS = (
    *("data.eval_size=null", "training.eval_steps=null", "training.gradient_accumulation_steps=1"),
    *("distributed.strategy=fsdp2", "data.max_length=256", "model.dtype=bfloat16"),
)
TOKENS, LAYERS = 4 * 256, 2


@pytest.mark.parametrize("number,rank", [(2, 0), (4, 3)])
def test_the_ring_sends_keys_and_values_three_times_and_their_gradients_home(number, rank):
    recipe, _ = on_gpus(
        load_recipe("tiny", [*SETTINGS, f"distributed.context={number}"]), f"{number}xrtx-4090"
    )
    config = load_model_config(recipe.model, architecture_only=True)
    trace = trace_layers(recipe, config, VirtualGPU("rtx-4090"), rank).trace
    first, last = [0, *trace.step_ends][-2:]
    sent = [entry.num_bytes for entry in trace.work[first:last] if entry.name == "all_to_all"]
    head_size = config.hidden_size // config.num_attention_heads
    of_part = 2 * 2 * TOKENS // number * config.num_key_value_heads * head_size  # in bfloat16
    # In forward, again, and in backward to all but the last; gradients in float32, to their own process at the end.
    around, home = 3 * (number - 1), number
    assert len(sent) == LAYERS * (around + home)
    assert sum(sent) == LAYERS * (around * of_part + home * 2 * of_part)


def test_a_process_has_its_share_of_the_tokens():
    recipe = load_recipe("tiny", [*SETTINGS, "checkpointing.mode=none"])
    whole = estimate_memory(recipe, "4xrtx-4090")
    spread = estimate_memory(
        load_recipe("tiny", [*SETTINGS, "checkpointing.mode=none", "distributed.context=4"]), "4xrtx-4090"
    )
    assert whole.step is not None
    assert spread.step is not None
    assert (whole.step.tokens, spread.step.tokens) == (TOKENS, TOKENS // 4)
    assert spread.plan.in_all(spread.step.tokens) == TOKENS
    assert spread.allocated_peak_bytes < whole.allocated_peak_bytes  # both with the same workspaces


def test_one_gpu_has_nobody_to_share_a_row_with():
    with pytest.raises(UserError, match="spreads each row over that many processes, got 1"):
        estimate_memory(load_recipe("tiny", ["distributed.context=2"]), "rtx-4090")
