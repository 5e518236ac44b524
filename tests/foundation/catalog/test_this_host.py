"""The costs of this machine's host are kept, and taken by estimates of its own GPU alone."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lowmem_ft.foundation.catalog.clock_rates import MEASURED_HOST_RANGE, host_range, reference_host
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.this_host import FILE_NAME, HostCosts, keep_host
from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE

NAME = "NVIDIA H200"
COSTS = HostCosts(gpu=NAME, operator_seconds=9e-6, launch_seconds=3e-6, triton_launch=2.5, date="2026-11-30")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def gpu_here(cuda_driver):
    def made(name=NAME):
        cuda_driver(name=name, total_memory=find_gpu("h200").memory_bytes, major=9, minor=0)
        return this_machines_gpu()

    return made


def test_estimates_of_this_machines_gpu_take_its_host_and_narrow_the_range(folder, gpu_here):
    usual = gpu_here()
    assert usual.rates.host_range == host_range()
    keep_host(COSTS)
    found = gpu_here().rates
    assert (found.operator_seconds, found.launch_seconds, found.triton_launch) == (9e-6, 3e-6, 2.5)
    assert found.host_range == MEASURED_HOST_RANGE
    assert dataclasses.replace(found, is_host_measured=False, **reference_host()) == usual.rates


def test_any_other_gpu_keeps_the_usual_host(folder, gpu_here):
    keep_host(COSTS)
    for rates in (find_gpu("h200").rates, gpu_here("NVIDIA H100 80GB HBM3").rates):
        assert rates.operator_seconds == reference_host()["operator_seconds"]
        assert rates.host_range == host_range()


def test_the_last_measurement_of_a_gpu_counts_and_those_of_others_stay(folder, gpu_here):
    other = dataclasses.replace(COSTS, gpu="NVIDIA L4")
    for costs in (COSTS, other, dataclasses.replace(COSTS, operator_seconds=8e-6)):
        assert keep_host(costs) == folder / FILE_NAME
    assert gpu_here().rates.operator_seconds == 8e-6
    assert gpu_here("NVIDIA L4").rates.operator_seconds == 9e-6


@pytest.mark.parametrize(
    "change",
    [
        {"processor": "another"},
        {"software": "another"},
        {"operator_seconds": -1},
        {"operator_seconds": "nan"},
        {"launch_seconds": None},
    ],
)
def test_of_another_machine_or_no_number_it_is_not_taken(folder, gpu_here, change):
    keep_host(COSTS)
    (row,) = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps([row | change, "no row", {}]))
    assert not gpu_here().rates.is_host_measured


def test_nothing_is_kept_where_nothing_may_be(monkeypatch, gpu_here):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, "off")
    assert keep_host(COSTS) is None
    assert not gpu_here().rates.is_host_measured
