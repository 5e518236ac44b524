"""Answers of a model that several processes train: whole in each of them, or cut among them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lowmem_ft.training.folder.generations_file import read_generations
from lowmem_ft.training.run.loop import train

ANSWERING = (
    *("training.max_steps=2", "training.save_steps=null", "training.eval_steps=1", "budget.preflight=false"),
    *("training.eval_generations=2", "training.max_new_tokens=5"),
)

TRAIN = """
import json, sys
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train

train(load_recipe("tiny", json.loads(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "ddp"])
def test_two_processes_give_the_answers_of_one(strategy, forks, tiny, tmp_path):
    """The main process alone writes them down. Two processes sum in another order: the first tokens tell."""
    one, two = tmp_path / "one", tmp_path / "two"
    train(tiny(*ANSWERING, "training.gradient_accumulation_steps=2", output_dir=one))
    settings = [
        *(f"training.output_dir={two}", "training.use_cpu=true", f"distributed.strategy={strategy}"),
        *(*ANSWERING, "training.gradient_accumulation_steps=1"),
    ]
    for done in forks.run_several(2, TRAIN, json.dumps(settings)):
        assert done.returncode == 0, done.stderr
    first, second = read_generations(one), read_generations(two)
    assert [dataclasses.replace(answer, answer="") for answer in second] == [
        dataclasses.replace(answer, answer="") for answer in first
    ]
    assert [answer.answer for answer in second[:2]] == [answer.answer for answer in first[:2]]
    assert len(second) == 6
