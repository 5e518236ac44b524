"""Techniques for activations and tiles: the estimate for a CPU beside every tensor of real steps."""

import dataclasses

import pytest
from measuring.comparison import compare, estimated_peaks
from measuring.cpu_matrix import ALWAYS
from measuring.families import write_families
from measuring.real_run import run_for_real
from sweeps import few_quick

from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe

ALLOWED_ERROR = 0.005
BASE = (
    *ALWAYS,
    "data.max_length=96",
    "loss.chunk_tokens=16",
    "model.attn_implementation=sdpa",
)
SETTINGS = {
    "selective": ("checkpointing.mode=selective",),
    "inputs": ("checkpointing.mode=full", "offload.activations=inputs"),
    "all": ("offload.activations=all",),
    "tiled MLP": ("checkpointing.mode=full", "tiling.mlp=4"),
    "tiled head": ("tiling.head=4", "loss.label_smoothing_factor=0.1"),
    "bf16 and all of it": (
        "model.dtype=bfloat16",
        "checkpointing.mode=selective",
        "offload.activations=inputs",
        "tiling.mlp=4",
        "tiling.head=4",
    ),
}


QUICK = ("all", "tiled head", "bf16 and all of it")


@pytest.mark.parametrize("name", few_quick(SETTINGS, QUICK))
def test_each_phase_takes_what_was_estimated(name, tmp_path):
    write_families(tmp_path)
    recipe = load_recipe(None, [f"model={tmp_path / 'llama'}", *BASE, *SETTINGS[name]])
    measured = dataclasses.asdict(run_for_real(recipe))
    estimated = estimated_peaks(estimate_memory(recipe, "cpu"))
    comparisons = list(compare(name, measured, estimated))
    assert len(comparisons) >= 3
    assert [comparison for comparison in comparisons if abs(comparison.error) > ALLOWED_ERROR] == []
