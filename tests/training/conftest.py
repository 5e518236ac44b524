from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lowmem_ft.recipe import load_recipe


@pytest.fixture
def tiny(tmp_path):
    """The recipe `tiny` in a folder of its own, with overrides."""

    def load(*overrides, output_dir: Path | None = None):
        folder = output_dir or tmp_path / "run"
        return load_recipe("tiny", [f"training.output_dir={folder}", "training.use_cpu=true", *overrides])

    return load


@pytest.fixture(scope="session")
def compiled_deepspeed(tmp_path_factory):
    """What DeepSpeed compiles at its first use on a CPU, in a process without a test's deadline."""
    builder = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as Builder"
    with (tmp_path_factory.mktemp("deepspeed") / "log").open("w+") as log:
        environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
        compiled = subprocess.run(
            [sys.executable, "-c", f"{builder}; Builder().load()"], env=environment, stdout=log, stderr=log
        )
        log.seek(0)
        assert compiled.returncode == 0, log.read()


@pytest.fixture
def metrics():
    """The step records of a run folder."""

    def read(folder: Path, key: str = "loss"):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [record[key] for record in records if "loss" in record]

    return read


@pytest.fixture
def recipes_folder():
    """The recipes that come with the project."""
    return Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    """A model whose head is no embedding, and whose rows nobody divides; float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from lowmem_ft.recipe import load_recipe

    tiny, folder = load_recipe("tiny", []).model.name_or_path, tmp_path_factory.mktemp("untied")
    config = AutoConfig.from_pretrained(tiny)
    sizes = {"hidden_size": 36, "intermediate_size": 70, "num_attention_heads": 6, "head_dim": 6}
    config.update({"tie_word_embeddings": False, "num_key_value_heads": 2, **sizes})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder
