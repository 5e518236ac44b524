"""Recipes that are rehearsed: the tiny one, on a GPU, with data of each test's own."""

from __future__ import annotations

import functools
import json

import pytest

from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.rehearsal import rehearse as rehearse_run
from lowmem_ft.recipe import load_recipe


@pytest.fixture(scope="session")
def traces(tmp_path_factory):
    """A folder of kept traces: what one rehearsal estimates of its worst batch, the next of the same recipe reads."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(autouse=True)
def _commands_keep_their_traces(traces, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(traces))


@pytest.fixture(scope="session")
def kept(traces):
    """The traces in that folder."""
    return KeptTraces(traces)


@pytest.fixture(scope="session")
def rehearse(kept):
    """A function that rehearses a run, whose estimate may be a kept one; the run itself is traced each time."""
    return functools.partial(rehearse_run, kept=kept)


@pytest.fixture(scope="session")
def chats_in():
    """A function that writes chats with answers of so many words into a folder."""

    def write(folder, numbers_of_words):
        file = folder / "chats.jsonl"
        lines = [
            {
                "messages": [
                    {"role": "user", "content": "Go?"},
                    {"role": "assistant", "content": "yes " * words},
                ]
            }
            for words in numbers_of_words
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return file

    return write


@pytest.fixture
def chats(chats_in, tmp_path):
    """A function that writes chats with answers of so many words."""
    return functools.partial(chats_in, tmp_path)


@pytest.fixture(scope="session")
def recipe_in():
    """A function that makes the tiny recipe, whose run's folder is in this one, with settings."""

    def make(folder, *settings):
        return load_recipe(
            "tiny", ["training.use_cpu=false", f"training.output_dir={folder / 'run'}", *settings]
        )

    return make


@pytest.fixture
def recipe(recipe_in, tmp_path):
    """The tiny recipe with settings."""
    return functools.partial(recipe_in, tmp_path)


@pytest.fixture(scope="session")
def small_settings():
    """Settings of a step of a third of the operators, for what does not depend on how many they are."""
    return (
        *("data.eval_size=null", "training.eval_steps=null", "training.gradient_accumulation_steps=1"),
        *("checkpointing.mode=none", "loss.chunk_tokens=null"),
    )


@pytest.fixture
def small(recipe, small_settings):
    """The tiny recipe with such a step, and with settings."""
    return functools.partial(recipe, *small_settings)
