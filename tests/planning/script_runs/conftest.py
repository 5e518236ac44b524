"""A folder that somebody's scripts are run in: a tiny model with its tokenizer, and what the scripts say."""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path

import pytest
from tiny_models import TINY
from transformers import AutoConfig, AutoModelForCausalLM


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Config and tokenizer, and no weights."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("data.jsonl"))
    return folder


@pytest.fixture
def script(tmp_path, monkeypatch, model_folder):
    """Writes a script into a folder of its own, which is the present one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(model_folder)

    def write(text: str, name: str = "train.py") -> str:
        Path(name).write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    return write


@pytest.fixture
def with_weights(script, tmp_path):
    """The same folder, its model one that can be loaded for real."""
    (tmp_path / "model").rename(tmp_path / "without")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained("without"))
    model.save_pretrained("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "model" / name).write_bytes((tmp_path / "without" / name).read_bytes())
    return script
