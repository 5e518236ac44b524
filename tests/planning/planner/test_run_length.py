"""The hours of a planned run, from its data."""

from __future__ import annotations

import shutil

import pytest
from chats_as_tokens import write_tokens
from tiny_models import TINY

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.memory.memory_estimate import StepTime
from lowmem_ft.planning.planner.run_length import run_length
from lowmem_ft.recipe import load_recipe

STEP = StepTime(seconds=2.0, tokens=8 * 128, bound_by="compute")


def test_a_run_is_as_many_steps_as_its_epochs_have(tmp_path):
    """56 of 64 chats are trained on, 8 a step, three times."""
    length = run_length(load_recipe("tiny"), STEP)
    assert length.steps == 21
    assert 0 < length.tokens < 21 * STEP.tokens
    assert length.seconds == pytest.approx(length.tokens / STEP.tokens_per_second)


def test_packed_rows_are_full_and_fewer():
    length = run_length(load_recipe("tiny", ["data.packing=true"]), STEP)
    assert length.steps < 21
    assert length.seconds <= length.steps * STEP.seconds
    alone = run_length(load_recipe("tiny"), STEP)
    assert length.tokens == alone.tokens


def test_the_steps_that_a_recipe_names_are_all():
    length = run_length(load_recipe("tiny", ["training.max_steps=7"]), STEP)
    assert length.steps == 7
    assert length.tokens == pytest.approx(run_length(load_recipe("tiny"), STEP).tokens / 3, abs=1)


def test_rows_of_tokens_are_counted_without_a_tokenizer(tmp_path):
    config = tmp_path / "config_alone"
    config.mkdir()
    shutil.copy(TINY / "config.json", config)
    tokens = write_tokens(tmp_path / "tokens.jsonl")
    assert run_length(load_recipe("tiny", [f"model={config}", tokens]), STEP) == run_length(
        load_recipe("tiny"), STEP
    )
    with pytest.raises(ModelError, match="No tokenizer could be read"):
        run_length(load_recipe("tiny", [f"model={config}"]), STEP)
