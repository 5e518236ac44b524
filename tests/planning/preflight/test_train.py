"""``lowmem_ft.train`` estimates in a process beside the run."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import logging
import os
import subprocess
import sys

import pytest
import torch

import lowmem_ft
from lowmem_ft import estimate_memory, load_recipe
from lowmem_ft.foundation.errors import DoesNotFitError, ModelError
from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.foundation.system import child_process
from lowmem_ft.planning.estimator.estimate import estimate_without_timeline
from lowmem_ft.planning.estimator.estimating_processes import EstimatingProcess
from lowmem_ft.planning.estimator.traces import tracing
from lowmem_ft.planning.preflight import background_estimate
from lowmem_ft.planning.preflight.background_estimate import BackgroundEstimate


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """Started among modules that are called as the libraries' are; nobody who trains from there imports them."""
    folder = tmp_path_factory.mktemp("somebodys")
    for name in ("torch", "datasets", "lowmem_ft"):
        (folder / f"{name}.py").write_text("raise RuntimeError('somebody else's module')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [path for path in sys.path if path not in ("", ".")])
        process = EstimatingProcess()
    with process:
        yield process


@pytest.fixture
def tiny(tmp_path):
    return load_recipe("tiny", [f"training.output_dir={tmp_path / 'run'}", "training.use_cpu=true"])


@pytest.mark.parametrize("gpu", ["cpu", pytest.param("t4", marks=pytest.mark.slow)])
def test_the_other_process_says_what_this_one_would(process, tiny, gpu):
    there = process.call(estimate_without_timeline, tiny, gpu)
    here = dataclasses.replace(estimate_memory(tiny, gpu), timeline=Timeline(), trace_seconds=0.0)
    assert dataclasses.replace(there, trace_seconds=0.0) == here


def test_an_error_there_is_one_here_and_the_next_question_is_answered(process, tiny):
    nowhere = dataclasses.replace(tiny, model=dataclasses.replace(tiny.model, name_or_path="./nowhere"))
    with pytest.raises(ModelError, match="nowhere"):
        process.call(estimate_without_timeline, nowhere, "cpu")
    assert process.call(estimate_without_timeline, tiny, "cpu").model.parameters > 0


def test_a_trace_that_takes_long_there_is_said_here(process, caplog):
    process.call(tracing._say_that_it_takes_long, "some/rwkv", "rwkv", 2048)
    assert "Tracing some/rwkv (rwkv) takes long." in caplog.text


def test_it_imports_what_this_process_would(process):
    assert process.call(importlib.util.find_spec, "lowmem_ft").origin == lowmem_ft.__file__


def test_a_run_is_trained_where_no_process_can_be_started(tiny, monkeypatch, caplog):
    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    preflight = BackgroundEstimate()
    preflight.begin(tiny, torch.device("cpu"))
    assert preflight.finish(None) is None
    (record,) = caplog.records
    assert (
        "no process could be started: [Errno 12] Cannot allocate memory. Training continues."
        in record.message
    )


def test_what_does_not_fit_is_not_trained(process, tiny, tmp_path, monkeypatch):
    """A batch that takes gigabytes, of which a budget allows two; the process is one that has its imports behind it."""
    monkeypatch.setattr(background_estimate, "EstimatingProcess", lambda: process)
    monkeypatch.setattr(process, "close", lambda: None)
    large = dataclasses.replace(
        tiny,
        data=dataclasses.replace(tiny.data, packing=True),
        training=dataclasses.replace(tiny.training, per_device_train_batch_size=8192),
        budget=lowmem_ft.Budget(device="2GiB"),
    )
    with pytest.raises(DoesNotFitError, match=r"more than budget.device=2GiB allows. The peak comes in"):
        lowmem_ft.train(large)
    assert not (tmp_path / "run").exists()


def test_a_run_that_cannot_be_estimated_is_trained_all_the_same(tiny, monkeypatch, caplog):
    monkeypatch.setattr(child_process, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    recipe = dataclasses.replace(tiny, training=dataclasses.replace(tiny.training, max_steps=1))
    with caplog.at_level(logging.WARNING):
        result = lowmem_ft.train(recipe)
    assert result.steps == 1
    assert "could not be estimated: it ended with exit code -9" in caplog.text


def test_the_other_process_ends_with_the_run(tiny):
    preflight = BackgroundEstimate()
    preflight.begin(tiny, torch.device("cpu"))
    process = preflight._process._process
    preflight.close()
    assert process.poll() is not None
    preflight.close()
