"""Peaks by phase, while everybody else still reads that of the whole run."""

from __future__ import annotations

import torch

from lowmem_ft.foundation.system import phase_peaks
from lowmem_ft.foundation.system.device_memory import read_device_memory
from lowmem_ft.foundation.system.host_memory import read_host_memory
from lowmem_ft.foundation.system.phase_peaks import PhasePeaks
from lowmem_ft.foundation.units import GIB, MIB

CPU = torch.device("cpu")


def test_a_phase_has_its_own_peak_and_the_run_keeps_the_highest(linux_process):
    peaks = PhasePeaks(CPU)
    for phase, most in {"load": 400 * MIB, "step": 140 * MIB}.items():
        with peaks.during(phase):
            linux_process.becomes(held=most)
            linux_process.becomes(held=100 * MIB)
    assert peaks.by_phase == {"load": 400 * MIB, "step": 140 * MIB}
    assert peaks.peak_bytes == read_host_memory().peak_bytes == 400 * MIB
    with peaks.during("step"):
        pass
    assert peaks.by_phase["step"] == 140 * MIB
    assert peaks.reserved_bytes is None


def test_a_phase_does_not_begin_with_what_the_heap_kept_of_the_one_before(linux_process, monkeypatch):
    monkeypatch.setattr(phase_peaks, "return_free_memory", lambda: linux_process.becomes(held=100 * MIB))
    peaks = PhasePeaks(CPU)
    with peaks.during("step"):
        linux_process.becomes(held=300 * MIB)
    with peaks.during("evaluation"):
        pass
    assert peaks.by_phase == {"step": 300 * MIB, "evaluation": 100 * MIB}


def test_a_system_that_keeps_one_peak_has_no_phases(linux_process):
    linux_process.can_reset = False
    peaks = PhasePeaks(CPU)
    with peaks.during("load"):
        pass
    assert peaks.by_phase == {}
    assert peaks.peak_bytes == 100 * MIB


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
