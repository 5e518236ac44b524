"""Something real happens for each value of each key of a technique: a run says it in its log, or has other losses."""

from __future__ import annotations

import functools
import logging

import pytest
from ground_truth.ladder_run import outcome_of
from measuring.families import FAMILIES
from technique_keys import BESIDE, KEYS, STREAMED, other_values
from transformers import AutoConfig

from lowmem_ft.recipe import load_recipe


@pytest.fixture(scope="module")
def seen_of(tmp_path_factory):
    """What is seen of a run, as its settings have it."""
    folder = tmp_path_factory.mktemp("run")
    AutoConfig.for_model(model_type="llama", **FAMILIES["llama"]).save_pretrained(folder)
    AutoConfig.for_model(model_type="mixtral", **FAMILIES["mixtral"]).save_pretrained(folder / "mixtral")
    always = [
        f"model={folder}",
        "model.weights=random",
        "data=any",
        "data.max_length=32",
        "training.use_cpu=true",
        "training.per_device_train_batch_size=1",
        "training.gradient_accumulation_steps=3",
        "training.learning_rate=1e-2",
    ]
    told: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: told.append(record.getMessage())
    logger = logging.getLogger("lowmem_ft")

    @functools.cache
    def seen(*settings):
        recipe = load_recipe(None, [*always, *(setting.format(folder=folder) for setting in settings)])
        told.clear()
        losses = outcome_of(recipe, folder).losses
        return losses, tuple(told)

    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield seen
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.mark.parametrize("path,value", [(path, value) for path in KEYS for value in other_values(path)])
def test_a_value_that_is_set_is_seen(path, value, seen_of):
    beside = BESIDE.get(path, ())
    assert seen_of(*beside, f"{path}={value}") != seen_of(*beside), (
        f"{path}={value} changes neither a loss nor a line of the log: does enabled_techniques.py enable it, and "
        "does its technique log a line with what it does? A key that only works beside others has these in BESIDE."
    )


def test_alike_runs_look_alike(seen_of):
    assert seen_of.__wrapped__(*STREAMED) == seen_of.__wrapped__(*STREAMED)
