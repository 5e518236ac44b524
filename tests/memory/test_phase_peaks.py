"""Peaks by phase, while everybody else still reads that of the whole run."""

from __future__ import annotations

import platform
import sys

import pytest
import torch

from lowmem_ft.memory import meter, process_memory
from lowmem_ft.memory.meter import read_device_memory, read_host_memory
from lowmem_ft.memory.phase_peaks import PhasePeaks
from lowmem_ft.units import GIB, KIB, MIB

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(meter, "_peaks_before", {})


@pytest.mark.skipif(sys.platform != "linux", reason="the host's peak can be reset on Linux only")
def test_a_phase_has_its_own_peak_and_the_run_keeps_the_highest():
    peaks = PhasePeaks(CPU)
    with peaks.during("load"):
        torch.ones(300 * MIB // 4)
    with peaks.during("step"):
        torch.ones(40 * MIB // 4)
    high, low = peaks.by_phase["load"], peaks.by_phase["step"]
    assert high - low > 200 * MIB
    assert peaks.peak_bytes >= high
    assert read_host_memory().peak_bytes >= high
    with peaks.during("step"):
        pass
    assert peaks.by_phase["step"] == low
    assert peaks.reserved_bytes is None


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep what they like")
def test_a_phase_does_not_begin_with_what_the_heap_kept_of_the_one_before():
    peaks, between = PhasePeaks(CPU), []
    with peaks.during("step"):
        freed = []
        for _ in range(2000):
            freed.append(torch.ones(100 * KIB // 4))
            between.append(bytes(1000))  # stays, so that the heap's end does not move back
        del freed
    with peaks.during("evaluation"):
        pass
    assert peaks.by_phase["step"] - peaks.by_phase["evaluation"] > 150 * MIB


def test_a_system_that_keeps_one_peak_has_no_phases(monkeypatch, tmp_path):
    monkeypatch.setattr(process_memory, "_CLEAR_REFS", tmp_path / "no" / "such" / "file")
    peaks = PhasePeaks(CPU)
    with peaks.during("load"):
        pass
    assert peaks.by_phase == {}
    assert peaks.peak_bytes > 0


def test_on_cuda_they_are_the_allocators(cuda_driver):
    driver, device = cuda_driver(), torch.device("cuda", 0)
    peaks = PhasePeaks(device)
    with peaks.during("load"):
        driver.hold(3 * GIB, 4 * GIB)
        driver.hold(1 * GIB, 4 * GIB)
    with peaks.during("step"):
        driver.hold(2 * GIB, 5 * GIB)
    assert peaks.by_phase == {"load": 3 * GIB, "step": 2 * GIB}
    assert peaks.reserved_bytes == 5 * GIB
    assert read_device_memory(device).peak_bytes == peaks.peak_bytes == 3 * GIB
