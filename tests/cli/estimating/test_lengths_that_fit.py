"""The longest rows that fit, asked of a recipe, of a model alone and of a script: what is said to fit does, alone."""

from __future__ import annotations

import json

import pytest
from tiny_models import SIZES
from transformers import LlamaConfig

from lowmem_ft.cli import main
from lowmem_ft.cli.estimating.estimate_options import length_argument
from lowmem_ft.foundation.errors import UserError

LOOP = """
import argparse
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--block-size", type=int)
tokens = parser.parse_args().block_size
model = torch.nn.Sequential(torch.nn.Embedding(100, 4096), torch.nn.Linear(4096, 4096)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randint(0, 100, (4, tokens), device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    LlamaConfig(**SIZES, max_position_embeddings=1 << 20).save_pretrained(tmp_path / "model")
    return "model=model"


def longest(words: list[str]):
    assert main([*words, "--longest-rows", "--json", "rows.json", "--overwrite"]) == 0
    with open("rows.json", encoding="utf-8") as file:
        return json.load(file)


def test_a_recipes_longest_rows_fit_alone_and_longer_ones_do_not(model, capsys):
    words = ["estimate", "recipe=7b-lora", model, "budget=500MiB", "--gpu", "l4"]
    found = longest(words)
    assert found["gpu"] == "l4"
    said = capsys.readouterr().out
    assert f"Rows of {found['tokens']:,} tokens fit" in " ".join(said.split())
    assert all(len(line) <= 80 for line in said.splitlines())
    assert main([*words, f"data.max_length={found['tokens']}"]) == 0
    assert main([*words, f"data.max_length={found['over_tokens']}", "--no-changes"]) == 3


def test_a_model_alone_has_the_longest_rows_of_each_method_with_the_command_that_trains_them(model, capsys):
    found = longest(["estimate", model, "adapter.name=lora", "budget=500MiB", "--gpu", "l4"])
    (lora,) = found["longest_rows"]
    assert lora["method"] == "lora"
    said = " ".join(capsys.readouterr().out.replace("\\\n", "").split())
    assert f"lowmem-ft train {' '.join(lora['settings'])} data.max_length={lora['tokens']}" in said
    assert main(["estimate", *lora["settings"], f"data.max_length={lora['tokens']}", "--gpu", "l4"]) == 0


def test_a_scripts_own_argument_is_changed(model, capsys):
    with open("loop.py", "w", encoding="utf-8") as file:
        file.write(LOOP)
    words = ["estimate", "--script", "loop.py", "--gpu", "rtx-4060", "--longest-rows", "--json", "rows.json"]
    assert main([*words, "--", "--block-size=1024"]) == 0
    with open("rows.json", encoding="utf-8") as file:
        found = json.load(file)
    assert found["tokens"] > 1024
    assert f"loop.py on rtx-4060. Rows of {found['tokens']:,} tokens fit" in " ".join(
        capsys.readouterr().out.split()
    )
    alone = ["estimate", "--script", "loop.py", "--gpu", "rtx-4060", "--", "--block-size"]
    assert main([*alone, str(found["tokens"])]) == 0
    assert main([*alone, str(found["over_tokens"])]) == 3


def test_an_argument_that_changes_nothing_is_refused(model, capsys):
    with open("loop.py", "w", encoding="utf-8") as file:
        file.write(LOOP.replace(".block_size", ".block_size and 256"))
    words = ["estimate", "--script", "loop.py", "--gpu", "rtx-4060", "--longest-rows", "--"]
    assert main([*words, "--block-size=1024"]) == 2
    assert "changes nothing: the peak is the same" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments, place, before",
    [
        (["data.json", "--max_length", "128"], 2, ""),
        (["--lr", "1e-4", "--max-seq-length=128"], 2, "--max-seq-length="),
        (["seq_len=128"], 0, "seq_len="),
        (["--max_length", "64", "--max_length", "128"], 3, ""),
    ],
)
def test_the_argument_for_the_length_is_found_as_scripts_name_it(arguments, place, before):
    assert length_argument(arguments) == (place, 128, before)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "got none after `--`"),
        (["--max_length"], "got nothing"),
        (["--max_length=0.5"], "got 0.5 for it"),
    ],
)
def test_without_such_an_argument_the_error_says_how_it_is_named(arguments, words):
    with pytest.raises(UserError, match=words):
        length_argument(arguments)
