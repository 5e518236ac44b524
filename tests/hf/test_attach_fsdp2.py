"""A recipe in a trainer whose processes share a model by FSDP 2: it trains what one process does, and saves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from sharded_trainers import CASES, model_for, run
from tiny_models import tiny_llama
from trained_by_processes import EXACT, ROUNDED, SUMS_ROUNDED, assert_alike
from transformers import AutoModelForCausalLM

QUICK = ("plain", "everything", "split24", "rounded-autocast", "sft", "lora", "dpo-lora")


def trained(forks, folder, worlds, names):
    for world in worlds:
        run(forks, world, "train", folder, *names)
    return {world: json.loads((folder / f"{world}.json").read_text()) for world in worlds}


@pytest.fixture(scope="module")
def quick(forks, tmp_path_factory):
    return trained(forks, tmp_path_factory.mktemp("quick"), (1, 3), QUICK)


@pytest.fixture(scope="module")
def in_all(forks, tmp_path_factory):
    return trained(forks, tmp_path_factory.mktemp("all"), (1, 2, 3), CASES)


def tolerance(name):
    if "bfloat16" in CASES[name]:
        return ROUNDED
    # One process rounds the inputs of products, and FSDP all weights, those of norms, too.
    return SUMS_ROUNDED if "bf16" in CASES[name] else EXACT


@pytest.mark.parametrize("name", QUICK)
def test_three_processes_train_what_one_does(name, quick):
    assert_alike(quick[1][name], quick[3][name], tolerance(name))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_any_number_of_processes_trains_what_one_does(name, world, in_all):
    assert_alike(in_all[1][name], in_all[world][name], tolerance(name))


@pytest.mark.parametrize("case", ["by-script", "tied lora checkpointing.mode=full"])
def test_checkpoints_are_read_by_any_number_of_processes(case, forks, tmp_path):
    """Bit for bit by as many; the files are those of a trainer, which vanilla libraries load."""
    folder = tmp_path / "two"
    run(forks, 2, "save", folder, case, "")
    whole = torch.load(folder / "after.pt")
    half = folder / "checkpoint-2"
    names = {path.name for path in half.iterdir()}
    weights = "adapter_model.safetensors" if "lora" in case else "model.safetensors"
    assert {weights, "trainer_state.json", "scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"} <= names
    assert not any("incomplete" in path.name for path in folder.iterdir())
    for world, tolerance in ((2, 0.0), (3, 1e-5), (1, 1e-5)):
        run(forks, world, "save", tmp_path / f"{world}", case, str(half))
        resumed = torch.load(tmp_path / f"{world}" / "after.pt")
        assert resumed["losses"] == pytest.approx(whole["losses"][2:], rel=tolerance, abs=0.0)
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(resumed["weights"][name], weight, rtol=tolerance, atol=tolerance)
    assert_loads(folder / "final", case, whole["weights"])


def assert_loads(folder: Path, case: str, weights):
    """A folder holds these weights for vanilla ``from_pretrained``."""
    words = set(case.split())
    if "lora" in words:
        loaded = PeftModel.from_pretrained(tiny_llama(tie_word_embeddings="tied" in words), folder)
    else:
        loaded = AutoModelForCausalLM.from_pretrained(folder)
    read = dict(loaded.named_parameters())
    assert read.keys() == weights.keys()
    for name, weight in weights.items():
        assert torch.equal(read[name], weight), name


def test_the_best_model_is_loaded_at_the_end(forks, tmp_path):
    """Of two evaluations the first is taken for the better one: its loss is higher."""
    fields = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "load_best_model_at_end": True,
        "greater_is_better": True,
    }
    run(forks, 2, "save", tmp_path, "optimizer.master=fp32", "", **fields)
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2
    after = torch.load(tmp_path / "after.pt")["weights"]
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.equal(weight, after[name]) for name, weight in best.named_parameters())
    assert not all(torch.equal(weight, after[name]) for name, weight in model_for(set()).named_parameters())
