"""The finished model is the best one that was evaluated, and a run ends early as transformers' callback ends it."""

from __future__ import annotations

import math
import os
import random
import shutil
import signal
import types

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

from lowmem_ft.foundation.errors import CheckpointError, Interrupted, UserError
from lowmem_ft.recipe import TrainingConfig
from lowmem_ft.training.evaluation import run_evaluations
from lowmem_ft.training.evaluation.best_model import BestModel
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.folder.checkpoint_folders import (
    Progress,
    delete_old_checkpoints,
    read_progress,
)
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import train

BEST = "training.load_best_model_at_end=true"
AUTO = "training.resume_from_checkpoint=auto"
SIX = (
    "training.max_steps=6",
    "training.eval_steps=2",
    "training.save_steps=null",
    "training.lr_scheduler_type=constant",
    "training.logging_steps=100",
)
"""Six steps; with fewer, the first ones are the same."""


@pytest.fixture
def held_out(monkeypatch):
    """Give a run's evaluations these losses, one after the other."""

    def script(*losses):
        left = iter(losses)
        monkeypatch.setattr(
            run_evaluations, "evaluate", lambda *args, **kwargs: EvaluationResult(next(left), 10)
        )

    return script


def weights(folder):
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def same(one, other):
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def checkpoints(run):
    return sorted(folder.name for folder in run.glob("checkpoint-*"))


RUNGS = {
    "plain": (),
    "packed, tied, bfloat16": ("model.dtype=bfloat16", "optimizer.master=split24", "optimizer.state=8bit"),
    "streamed, offloaded": (
        "offload.parameters=stream",
        "offload.optimizer=host",
        "accumulation.order=vertical",
        "optimizer.in_backward=true",
    ),
    "lora": ("adapter.name=lora",),
    "qlora": ("adapter.name=lora", "model.quantization=nf4"),
}


@pytest.mark.parametrize(
    "rung",
    [pytest.param(name, marks=[] if name == "streamed, offloaded" else pytest.mark.slow) for name in RUNGS],
)
def test_the_finished_model_is_the_one_of_the_best_evaluation(tiny, held_out, tmp_path, rung):
    best, shorter = tmp_path / "best", tmp_path / "shorter"
    held_out(3.0, 1.0, 2.0)
    result = train(tiny(*SIX, *RUNGS[rung], BEST, "training.save_total_limit=1", output_dir=best))
    held_out(3.0, 1.0)
    train(tiny(*SIX, *RUNGS[rung], "training.max_steps=4", output_dir=shorter))
    assert same(best / "model", shorter / "model")
    names = [{file.name for file in (run / "model").iterdir()} for run in (best, shorter)]
    assert names[0] == names[1]
    assert (result.best_step, result.steps, result.stopped) == (4, 6, None)
    assert result.evaluation == EvaluationResult(1.0, 10)
    assert checkpoints(best) == ["checkpoint-4"]
    card = (best / "model" / "README.md").read_text()
    assert "| step of these weights, the best evaluated | 4 |" in card
    assert "| held-out loss (nats per token) | 1.0000 |" in card


@pytest.mark.slow
def test_without_it_the_finished_model_is_the_last(tiny, held_out, tmp_path):
    held_out(3.0, 1.0, 2.0)
    result = train(tiny(*SIX))
    held_out(3.0, 1.0)
    train(tiny(*SIX, "training.max_steps=4", output_dir=tmp_path / "shorter"))
    assert not same(tmp_path / "run" / "model", tmp_path / "shorter" / "model")
    assert result.best_step is None
    assert result.evaluation == EvaluationResult(2.0, 10)
    assert checkpoints(tmp_path / "run") == []


def test_a_last_evaluation_that_is_the_best_needs_no_checkpoint(tiny, held_out, tmp_path):
    held_out(3.0, 2.0, 1.0)
    assert train(tiny(*SIX, BEST)).best_step == 6
    assert checkpoints(tmp_path / "run") == ["checkpoint-2", "checkpoint-4"]


def test_what_is_not_finite_is_never_the_best(tiny, held_out, tmp_path, caplog):
    held_out(math.nan, 2.0, math.nan)
    assert train(tiny(*SIX, BEST)).best_step == 4
    assert "not true of the finished model, which is the best: The held-out loss is nan." in caplog.text
    held_out(math.nan, math.nan, math.nan)
    with pytest.raises(UserError, match="do not use"):
        train(tiny(*SIX, BEST, output_dir=tmp_path / "none"))


@pytest.mark.parametrize("limit,left", [(1, "26"), (2, "26"), (3, "256"), (None, "123456")])
def test_the_best_is_never_deleted(tmp_path, limit, left):
    """As in transformers, it is among those that the limit counts, except where the limit is 1."""
    for step in range(1, 7):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "checkpoint.json").write_text("{}")
    delete_old_checkpoints(tmp_path, limit, step=6, best=2)
    assert checkpoints(tmp_path) == [f"checkpoint-{step}" for step in left]


def test_it_counts_as_transformers_does(tmp_path):
    """With values that rise, fall, stay and barely change, in either direction; its callback is the oracle."""
    draw = random.Random(0)
    for _ in range(300):
        greater, threshold = draw.random() < 0.5, draw.choice([0.0, 0.1, 0.3])
        config = TrainingConfig(
            metric_for_best_model="eval_perplexity",
            greater_is_better=greater,
            early_stopping_patience=2,
            early_stopping_threshold=threshold,
        )
        progress = Progress(position=None)
        best = BestModel(config, RunFolder(tmp_path, resume_from=None, overwrite=False), progress)
        theirs = EarlyStoppingCallback(2, threshold)
        args = types.SimpleNamespace(greater_is_better=greater)
        state = types.SimpleNamespace(best_metric=None)
        for step in range(1, 9):
            result = EvaluationResult(draw.choice([0.5, 0.51, 0.6, 0.8, 1.1]), 10)
            progress.step = step
            best.compare(result)
            theirs.check_metric_value(args, state, None, result.perplexity)
            better = max if greater else min
            state.best_metric = better(state.best_metric or result.perplexity, result.perplexity)
            assert progress.evaluations_without_gain == theirs.early_stopping_patience_counter
            assert progress.best.metrics["eval_perplexity"] == state.best_metric


def test_a_run_ends_once_its_patience_does(tiny, held_out, tmp_path, caplog):
    held_out(2.0, 1.0, 0.95, 0.91, 0.8)
    patience = ("training.early_stopping_patience=2", "training.early_stopping_threshold=0.1")
    with caplog.at_level("INFO", "lowmem_ft"):
        result = train(tiny(*SIX, "training.max_steps=20", BEST, *patience))
    assert (result.steps, result.best_step) == (8, 8)
    by = "by more than training.early_stopping_threshold=0.1"
    assert result.stopped == f"The held-out result has not improved {by} for 2 evaluations in a row."
    assert "The run ends at step 8. The held-out result has not" in caplog.text


UNSTEADY = (
    "training.max_steps=30",
    "training.eval_steps=2",
    "training.save_steps=3",
    "training.learning_rate=0.05",
    "training.early_stopping_patience=3",
    "training.save_total_limit=1",
    BEST,
)
"""A run whose held-out loss rises after a while, and which ends there."""

KILL_ITSELF = """
import os, signal, sys
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.run.loop import train
from lowmem_ft.training.folder.run_folder import RunFolder

step, *settings = sys.argv[1:]
write = RunFolder.write_metrics

def write_and_die(self, record):
    write(self, record)
    if record["step"] == int(step) and "loss" in record:
        os.kill(os.getpid(), signal.SIGKILL)

RunFolder.write_metrics = write_and_die
train(load_recipe("tiny", settings))
"""


def test_a_killed_run_ends_at_the_same_step_with_the_same_best(tiny, forks, metrics, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = train(tiny(*UNSTEADY, output_dir=whole))
    assert result.best_step is not None
    assert result.best_step + 3 < result.steps < 30
    at = str(result.steps - 1)  # the last evaluation and its patience are still to come
    done = forks.run(KILL_ITSELF, at, *UNSTEADY, "training.use_cpu=true", f"training.output_dir={killed}")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not (killed / "model").exists()
    again = train(tiny(*UNSTEADY, AUTO, output_dir=killed))
    assert (again.steps, again.best_step, again.stopped) == (result.steps, result.best_step, result.stopped)
    assert again.evaluation == result.evaluation
    assert metrics(killed) == metrics(whole)
    assert same(whole / "model", killed / "model")


def test_a_run_stopped_where_its_patience_ended_takes_no_further_step(tiny, held_out, monkeypatch, tmp_path):
    held_out(1.0, 2.0, 3.0)
    settings = (*SIX, "training.max_steps=20", "training.early_stopping_patience=1", BEST)
    compare = BestModel.compare

    def compare_and_interrupt(self, result):
        compare(self, result)
        if result.loss == 2.0:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(BestModel, "compare", compare_and_interrupt)
    with pytest.raises(Interrupted) as stop:
        train(tiny(*settings))
    assert read_progress(stop.value.checkpoint).evaluations_without_gain == 1
    result = train(tiny(*settings, AUTO))
    assert (result.steps, result.best_step) == (4, 2)
    assert result.evaluation == EvaluationResult(1.0, 10)


def test_a_best_checkpoint_that_is_gone_is_missed_before_the_first_step(tiny, held_out, tmp_path):
    held_out(1.0, 2.0, 3.0)
    train(tiny(*SIX, BEST, "training.save_steps=6"))
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    longer = (*SIX, AUTO, "training.max_steps=8")
    with pytest.raises(CheckpointError, match=r"checkpoint-2 has the best .*load_best_model_at_end=false"):
        train(tiny(*longer, BEST))
    held_out(4.0, 4.0)
    assert train(tiny(*longer)).best_step is None


@pytest.mark.slow
def test_a_run_that_goes_on_elsewhere_finds_its_best(tiny, held_out, tmp_path):
    held_out(1.0, 2.0, 3.0)
    train(tiny(*SIX, BEST, "training.save_steps=6"))
    from_there = f"training.resume_from_checkpoint={tmp_path / 'run' / 'checkpoint-6'}"
    held_out(3.0, 4.0)
    result = train(tiny(*SIX, BEST, from_there, "training.max_steps=7", output_dir=tmp_path / "other"))
    assert result.best_step == 2
    assert same(tmp_path / "other" / "model", tmp_path / "run" / "checkpoint-2")


TRAIN = """
import sys
from lowmem_ft.recipe import load_recipe
from lowmem_ft.training.evaluation import run_evaluations
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.run.loop import train

losses = iter((3.0, 1.0, 2.0))
run_evaluations.evaluate = lambda *args, **kwargs: EvaluationResult(next(losses), 10)
train(load_recipe("tiny", sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "settings", [(), pytest.param(("adapter.name=lora",), marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_processes_that_share_a_model_finish_with_the_best(forks, tmp_path, settings):
    best, shorter = tmp_path / "best", tmp_path / "shorter"
    of_two = ("training.use_cpu=true", "distributed.strategy=fsdp2", *SIX, *settings)
    for folder, more in ((best, [BEST]), (shorter, ["training.max_steps=4"])):
        for done in forks.run_several(2, TRAIN, *of_two, *more, f"training.output_dir={folder}"):
            assert done.returncode == 0, done.stderr
    assert same(best / "model", shorter / "model")
    names = [{file.name for file in (run / "model").iterdir()} for run in (best, shorter)]
    assert names[0] == names[1]
