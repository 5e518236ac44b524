"""A CUDA device of this machine, with what others hold of it."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from lowmem_ft.foundation.catalog import this_machine
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.packages import KERNEL_PACKAGES, LEFT_OUT_VARIABLE
from lowmem_ft.foundation.units import GIB, MIB

RTX_4090 = {"name": "NVIDIA GeForce RTX 4090", "total_memory": 23 * GIB, "major": 8, "minor": 9}


CLOCKS = {
    "t4": (1590, 5001, 256),
    "rtx-3090": (1695, 9751, 384),
    "a100-40gb": (1410, 1215, 5120),
    "a40": (1740, 7251, 384),
    "rtx-4090": (2520, 10501, 384),
    "h100-80gb": (1980, 2619, 5120),
    "rtx-5090": (2407, 14001, 512),
}
"""Boost and memory clocks in MHz, and bits of the memory bus, as drivers report them."""


@pytest.mark.parametrize("name", CLOCKS)
def test_the_driver_tells_of_an_unknown_gpu_what_the_catalogue_tells_of_a_known_one(cuda_driver, name):
    known, (clock, memory_clock, bits) = find_gpu(name), CLOCKS[name]
    line = "GeForce Something" if "GeForce" in known.full_name else "Something"
    cuda_driver(
        name=f"NVIDIA {line}",
        total_memory=known.memory_bytes,
        major=known.compute_capability[0],
        minor=known.compute_capability[1],
        multi_processor_count=known.num_multiprocessors,
        clock_rate=1000 * clock,
        memory_clock_rate=1000 * memory_clock,
        memory_bus_width=bits,
    )
    gpu = this_machines_gpu()
    assert gpu.bandwidth == pytest.approx(known.bandwidth, rel=0.01)
    assert gpu.dense_flops == pytest.approx(known.dense_flops, rel=0.03)
    assert gpu.name not in load_gpus()
    assert gpu.prices == ()
    assert f"the catalogue does not know NVIDIA {line}" in gpu.note


def test_an_unknown_gpu_is_not_taken_for_its_nearest_relative(cuda_driver):
    cuda_driver(
        name="NVIDIA B300 SXM6 AC",
        total_memory=268 * GIB,
        major=10,
        minor=3,
        multi_processor_count=148,
        clock_rate=1_920_000,
        memory_clock_rate=3_996_000,
        memory_bus_width=8192,
    )
    gpu = this_machines_gpu()
    assert (gpu.name, gpu.full_name) == ("b300-sxm6-ac", "NVIDIA B300 SXM6 AC")
    assert (gpu.memory_bytes, gpu.compute_capability) == (268 * GIB, (10, 3))
    assert gpu.bandwidth == pytest.approx(8.18e12, rel=0.01)
    assert "from b200, of another architecture, come ratios of its types' operations, host link" in gpu.note


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 4090 Laptop GPU"])
def test_a_longer_name_is_another_gpu(cuda_driver, name):
    cuda_driver(
        **RTX_4090 | {"name": name}, clock_rate=2_000_000, memory_clock_rate=9_001_000, memory_bus_width=256
    )
    gpu = this_machines_gpu()
    assert gpu.name != "rtx-4090"
    assert gpu.bandwidth == pytest.approx(576e9, rel=0.01)


def test_what_the_driver_does_not_tell_is_said_to_be_the_relatives(cuda_driver):
    cuda_driver(name="NVIDIA Something 2000", total_memory=47 * GIB, major=8, minor=9)
    gpu = this_machines_gpu()
    assert gpu.bandwidth == find_gpu("rtx-6000-ada").bandwidth
    assert (
        "from rtx-6000-ada come operations a second, bandwidth, host link, so that seconds are a guess"
        in gpu.note
    )


@pytest.mark.parametrize("name", ["NVIDIA GB10", "Orin", "NVIDIA Thor"])
def test_memory_that_is_the_hosts_is_refused(cuda_driver, name):
    cuda_driver(name=name, total_memory=119 * GIB, major=12, minor=1, is_integrated=1)
    with pytest.raises(UserError, match=rf"needs memory of its own, got {name}, which shares the host's"):
        this_machines_gpu()


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA T4", "NVIDIA H200"])
def test_a_known_gpu_is_known_by_each_of_its_drivers_names(cuda_driver, name):
    cuda_driver(name=name, total_memory=15 * GIB)
    gpu = this_machines_gpu()
    assert gpu.name == name.split()[1].lower()
    assert gpu.note == ""


def test_no_wording_of_a_source_decides_whether_a_context_is_an_estimate():
    """A reworded source had made measured contexts of estimated ones."""
    gpu = find_gpu("h200")
    reworded = dataclasses.replace(gpu, sources={**gpu.sources, "context_mib": "estimated by its neighbours"})
    assert reworded.context_is_estimate == gpu.context_is_estimate


def test_a_relatives_context_is_an_estimate(cuda_driver):
    cuda_driver(name="NVIDIA Something 3000", total_memory=140 * GIB, major=9, minor=0)
    assert not find_gpu("h200").context_is_estimate
    assert this_machines_gpu().context_is_estimate


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


@pytest.mark.parametrize("installed", [set(), {"fla"}, {"fla", "causal_conv1d", "mamba_ssm"}])
def test_which_packages_with_kernels_it_has_is_looked_up_and_not_assumed(cuda_driver, monkeypatch, installed):
    cuda_driver(**RTX_4090)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in installed else None)
    modules = {KERNEL_PACKAGES[name] for name in this_machines_gpu().kernel_packages}
    assert modules == installed
    assert set(find_gpu("rtx-4090").kernel_packages) == set(KERNEL_PACKAGES)
    monkeypatch.setenv(LEFT_OUT_VARIABLE, "1")
    assert find_gpu("rtx-4090").kernel_packages == ()


def test_of_a_gpu_of_the_catalogue_nothing_is_known_about_others():
    gpu = find_gpu("rtx-4090")
    assert gpu.held_by_others_bytes is None
    assert gpu.available_bytes == gpu.memory_bytes
