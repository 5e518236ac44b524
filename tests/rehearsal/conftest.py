"""Recipes that are rehearsed: the tiny one, on a GPU, with data of each test's own."""

from __future__ import annotations

import json

import pytest

from lowmem_ft.recipe import load_recipe


@pytest.fixture
def chats(tmp_path):
    """A function that writes chats with answers of so many words."""

    def write(numbers_of_words):
        file = tmp_path / "chats.jsonl"
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
def recipe(tmp_path):
    """The tiny recipe with settings."""

    def make(*settings):
        return load_recipe(
            "tiny", ["training.use_cpu=false", f"training.output_dir={tmp_path / 'run'}", *settings]
        )

    return make
