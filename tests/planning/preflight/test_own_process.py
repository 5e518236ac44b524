"""Estimates before training in one Python process: on a machine with CUDA they are made in another one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import lowmem_ft
from lowmem_ft.foundation import virtual_device
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.preflight import own_process
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.virtual_gpu import VirtualGPU

CUDA = torch.device("cuda", 0)


@pytest.fixture
def with_a_gpu(monkeypatch):
    """This process sees a T4, has had no virtual GPU, and gets none."""

    def refuse(gpu):
        raise AssertionError("a virtual GPU in the process that may train")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(own_process, "this_machines_gpu", lambda: find_gpu("t4"))
    monkeypatch.setattr(own_process, "has_virtual_device", lambda: False)
    monkeypatch.setattr(VirtualGPU, "__enter__", refuse)


def test_estimates_and_plans_are_made_in_another_process(with_a_gpu, monkeypatch):
    recipe, progress = lowmem_ft.load_recipe("tiny"), []
    found = lowmem_ft.estimate_memory(recipe)
    chosen = lowmem_ft.plan_checkpointing(
        lowmem_ft.load_recipe("tiny", ["checkpointing.mode=auto"]), on_progress=progress.append
    )
    with pytest.raises(UserError, match="abacus"):
        lowmem_ft.estimate_memory(recipe, gpu="abacus")
    monkeypatch.undo()
    here = estimate_memory(recipe, "t4")
    assert found.gpu.name == "t4"
    assert dataclasses.replace(found, trace_seconds=0) == dataclasses.replace(here, trace_seconds=0)
    assert chosen.fits
    assert progress


def test_where_no_gpu_is_seen_there_is_no_other_process(monkeypatch):
    monkeypatch.setattr(own_process, "EstimatingProcess", None)
    assert lowmem_ft.estimate_memory(lowmem_ft.load_recipe("tiny"), "t4").fits


def test_a_process_that_had_a_virtual_gpu_does_not_train_on_a_real_one(monkeypatch):
    with VirtualGPU("t4"):
        Runtime.in_one_process(CUDA)  # a rehearsal's
    with pytest.raises(UserError, match="had a virtual GPU cannot train on a real one"):
        Runtime.in_one_process(CUDA)
    Runtime.in_one_process(torch.device("cpu"))
    monkeypatch.setattr(virtual_device, "has_virtual_device", lambda: False)
    Runtime.in_one_process(CUDA)
