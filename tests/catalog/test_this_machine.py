"""A CUDA device of this machine, with what others hold of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lowmem_ft.catalog import this_machine
from lowmem_ft.catalog.gpu_catalog import find_gpu
from lowmem_ft.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.units import GIB, MIB

RTX_4090 = {"name": "NVIDIA GeForce RTX 4090", "total_memory": 23 * GIB, "major": 8, "minor": 9}


def test_an_unknown_gpu_is_taken_for_its_nearest_relative(cuda_driver):
    cuda_driver(name="NVIDIA Something 2000", total_memory=47 * GIB, major=8, minor=9)
    gpu = this_machines_gpu()
    assert gpu.full_name == "NVIDIA Something 2000"
    assert gpu.memory_bytes == 47 * GIB
    assert gpu.compute_capability == (8, 9)
    assert gpu.name == "rtx-6000-ada"


def test_no_wording_of_a_source_decides_whether_a_context_is_an_estimate():
    """A reworded source had made measured contexts of estimated ones."""
    gpu = find_gpu("h200")
    reworded = dataclasses.replace(gpu, sources={**gpu.sources, "context_mib": "estimated by its neighbours"})
    assert reworded.context_is_estimate == gpu.context_is_estimate


def test_a_relatives_context_is_an_estimate(cuda_driver):
    cuda_driver(name="NVIDIA Something 3000", total_memory=140 * GIB, major=9, minor=0)
    assert not find_gpu("h200").context_is_estimate
    gpu = this_machines_gpu()
    assert gpu.name == "h200"
    assert gpu.context_is_estimate


@pytest.mark.parametrize("device", [None, torch.device("cuda"), torch.device("cuda", 0)])
def test_what_is_neither_free_nor_ours_is_held_by_others(cuda_driver, device):
    driver = cuda_driver(**RTX_4090)
    driver.bytes["context"] = find_gpu("rtx-4090").context_bytes
    driver.bytes["others"] = 3 * GIB
    driver.hold(GIB, 2 * GIB)
    gpu = this_machines_gpu(device)
    assert gpu.held_by_others_bytes == 3 * GIB
    assert gpu.available_bytes == 20 * GIB


@pytest.mark.parametrize("off_by", [-100 * MIB, 0, 100 * MIB])
def test_a_context_of_another_size_is_not_taken_for_others(cuda_driver, off_by):
    cuda_driver(**RTX_4090).bytes["context"] = find_gpu("rtx-4090").context_bytes + off_by
    assert this_machines_gpu().held_by_others_bytes == 0


@pytest.mark.parametrize("lacks", [None, "Triton needs a C compiler."])
def test_whether_it_has_triton_is_looked_up_and_not_assumed(cuda_driver, monkeypatch, lacks):
    cuda_driver(**RTX_4090)
    monkeypatch.setattr(this_machine, "triton_lacks", lambda: lacks)
    assert this_machines_gpu().has_triton == (lacks is None)
    assert find_gpu("rtx-4090").has_triton


def test_of_a_gpu_of_the_catalogue_nothing_is_known_about_others():
    gpu = find_gpu("rtx-4090")
    assert gpu.held_by_others_bytes is None
    assert gpu.available_bytes == gpu.memory_bytes
