"""What a session says of itself as it is planned."""

from __future__ import annotations

import logging

import pytest

from lowmem_ft.planning.rehearsal import rehearse
from lowmem_ft.recipe import load_recipe

ALL_FLOAT32 = "Weights and products are float32"


@pytest.mark.parametrize(
    "gpu, settings, words",
    [
        (
            "l4",
            ["checkpointing.mode=none"],
            f"{ALL_FLOAT32} without checkpointing (checkpointing.mode=full). On NVIDIA L4 ",
        ),
        pytest.param(
            "l4",
            [],
            f"{ALL_FLOAT32}. On NVIDIA L4 training.mixed_precision=bf16, or ",
            marks=pytest.mark.slow,
        ),
        ("l4", ["training.mixed_precision=bf16"], None),
        ("t4", [], None),
    ],
)
def test_float32_is_no_silent_default_where_a_gpu_has_bfloat16(gpu, settings, words, caplog, tmp_path):
    recipe = load_recipe("tiny", [f"training.output_dir={tmp_path}", *settings])
    with caplog.at_level(logging.INFO):
        rehearse(recipe, gpu, steps=1)
    said = [record.getMessage() for record in caplog.records if ALL_FLOAT32 in record.getMessage()]
    assert len(said) == (words is not None)
    assert all(line.startswith(words or "") for line in said)
