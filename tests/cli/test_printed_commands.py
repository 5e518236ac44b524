"""What answers tell users to run, run: each printed command is taken from the output, and is not refused.

A model, a method and a GPU are drawn. Where a run does not fit, a command has to be printed. Each one runs in this
process until its first trace has built the model and switched its techniques on. A ``train`` line needs data, weights
and a GPU that are not here: it runs as the ``estimate`` that the answer offers in its place, on the answer's GPU.
"""

from __future__ import annotations

import random
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
from sweeps import few_quick
from tiny_models import SIZES
from transformers import GPT2Config, LlamaConfig, Qwen3Config

from lowmem_ft.cli import main
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.model_architectures import load_architectures

OWN = {
    "llama of 12 layers": LlamaConfig(**{**SIZES, "num_hidden_layers": 12}, max_position_embeddings=512),
    "qwen3 of 3 layers": Qwen3Config(**{**SIZES, "num_hidden_layers": 3}, num_key_value_heads=2, head_dim=8),
    "gpt2 of 2 layers": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
}
METHODS = (
    (),
    ("adapter.name=none",),
    ("adapter.name=lora",),
    ("adapter.r=8",),
    ("model.quantization=nf4",),
    ("model.quantization=nf4", "adapter.name=lora"),
)
OTHERS = ((), (), ("data.max_length=128",), ("training.per_device_train_batch_size=2",))
TOO_SMALL, TIGHT = "budget=100MiB", "budget=430MiB"
"""Less than a process takes that has touched any GPU of the catalogue, and a little more than on an RTX 4090."""

BUDGETS = ((), (), (TOO_SMALL,), ("budget=2GiB",))
LARGE = ("qwen3-14b", "qwen3-32b", "llama-3.1-70b")
MOST_PARAMETERS = 2_000_000_000
SEED, DRAWN = 3, 20

PROGRAM = ("lowmem-ft", "lowmem_ft")
"""Its name as a command, and as a module that torchrun starts."""


@dataclass(frozen=True)
class Asked:
    """A question: a model of ``OWN`` or the catalogue, what is typed about the method, a value of ``--gpu``."""

    model: str
    typed: tuple[str, ...]
    gpu: str

    def words(self, folder: Path) -> list[str]:
        model = folder / self.model if self.model in OWN else self.model
        return ["estimate", f"model={model}", *self.typed]


def drawn() -> list[Asked]:
    draws = random.Random(SEED)
    small = [
        name for name, found in load_architectures().items() if found.published_parameters < MOST_PARAMETERS
    ]
    models = [*small, *3 * [*OWN], *LARGE]
    gpus = [*load_gpus()]
    places = [*gpus, *(f"{number}x{gpu}" for gpu in gpus[::3] for number in (2, 8)), *2 * ["all"]]
    return [
        Asked(
            draws.choice(models),
            (*draws.choice(METHODS), *draws.choice(OTHERS), *draws.choice(BUDGETS)),
            draws.choice(places),
        )
        for _ in range(DRAWN)
    ]


QUICK = [
    Asked("llama of 12 layers", ("model.quantization=nf4", TIGHT), "rtx-4090"),
    Asked("llama of 12 layers", ("adapter.name=lora",), "rtx-4090"),
    Asked("gpt2 of 2 layers", ("adapter.name=lora", TIGHT), "2xrtx-4090"),
    Asked("qwen3 of 3 layers", ("model.quantization=none", TOO_SMALL), "all"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("own models")  # a blank, which has to be quoted
    for name, config in OWN.items():
        config.save_pretrained(path / name)
    return path


class FirstTraceError(BaseException):
    """No error of ours, so that nothing handles it: a command has come as far as its first step."""


@pytest.mark.parametrize("asked", few_quick([*QUICK, *drawn()], QUICK), ids=str)
def test_every_command_that_an_answer_prints_runs(asked, folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    words = [*asked.words(folder), "--gpu", asked.gpu]
    exit_code = main(words)
    said = capsys.readouterr()
    assert exit_code in ((3,) if {TOO_SMALL, TIGHT} & {*asked.typed} else (0, 3)), said.err
    commands = printed_commands(said.out)
    if exit_code == 3:
        assert any(command[0] == "plan" for command in commands), said.out

    def stop(*arguments):
        raise FirstTraceError

    monkeypatch.setattr("lowmem_ft.planning.estimator.traces.tracing._take_steps", stop)
    for command in commands:
        if command[0] == "train":
            gpu = next(iter(load_gpus())) if asked.gpu == "all" else asked.gpu
            command = ["estimate", *command[1:], "--gpu", gpu]
        try:
            exit_code = main(command)
        except FirstTraceError:
            continue
        assert exit_code in (0, 3), (command, capsys.readouterr().err)


def printed_commands(text: str) -> list[list[str]]:
    """Return the words after the program's name of each command in a report, on lines of their own or in a sentence."""
    joined = text.replace("\\\n", " ")
    lines = [line for line in joined.splitlines() if re.match(r" +(lowmem-ft|torchrun) ", line)]
    lines += re.findall(r"`(lowmem-ft [^`]*=[^`]*)`", " ".join(joined.split()))
    commands = map(shlex.split, lines)
    return [words[max(words.index(name) for name in PROGRAM if name in words) + 1 :] for words in commands]
