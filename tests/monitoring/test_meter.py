"""Peaks belong to the phase that made them, however they are counted, and to the run."""

from __future__ import annotations

import gc
import json
import sys

import pytest
import torch
from torch import nn

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system import device_memory
from lowmem_ft.foundation.system.device_memory import begin_phase, read_device_memory
from lowmem_ft.foundation.system.host_memory import read_host_memory
from lowmem_ft.foundation.system.phase_peaks import PhasePeaks
from lowmem_ft.foundation.units import MIB
from lowmem_ft.monitoring import MemoryMeter

CUDA = torch.device("cuda", 0)


def by_name(meter):
    return {phase.name: phase for phase in meter.phases}


# --- every storage of a CPU ---------------------------------------------------------------------------------------


@pytest.fixture
def exact():
    gc.collect()
    with MemoryMeter("cpu", exact=True) as meter:
        yield meter


def test_each_storage_of_a_cpu_counts_in_the_phases_around_it(exact):
    before = exact.mark("before").allocated_bytes
    with exact.phase("outer"):
        kept = torch.zeros(256)
        with exact.phase("inner"):
            passing = torch.zeros(1024)
            del passing
        with exact.phase("later"):
            later = kept + 1
    with exact.phase("outer"):
        del later
    phases = by_name(exact)
    peaks = {name: phase.peak.allocated_bytes - before for name, phase in phases.items()}
    assert peaks == {"before": 0, "outer": 5120, "outer/inner": 5120, "outer/later": 2048}
    assert phases["outer"].runs == 2
    assert phases["outer"].now.allocated_bytes - before == 1024
    assert exact.peak.allocated_bytes - before == 5120


def test_tensors_from_before_count_and_may_go(exact):
    held = torch.zeros(1000)
    with MemoryMeter("cpu", exact=True) as meter:
        before = meter.mark("before").allocated_bytes
        del held
        assert before - meter.mark("after").allocated_bytes == 4000


def test_a_phase_that_fails_counts(exact):
    before = exact.mark("before").allocated_bytes
    with pytest.raises(ZeroDivisionError), exact.phase("fails"):
        raise ZeroDivisionError(torch.zeros(256))
    assert by_name(exact)["fails"].peak.allocated_bytes - before == 1024
    with exact.phase("fails"):  # it is not open any more
        pass


# --- resident memory ----------------------------------------------------------------------------------------------


def test_the_peak_of_resident_memory_belongs_to_its_phase(linux_process):
    with MemoryMeter("cpu") as meter:
        with meter.phase("large"):
            linux_process.becomes(held=196 * MIB)
            linux_process.becomes(held=100 * MIB)
        with meter.phase("small"):
            linux_process.becomes(held=101 * MIB, of_files=400 * MIB)
    large, small = (phase.peak.host_bytes for phase in meter.phases)
    assert (large, small) == (196 * MIB, 101 * MIB)
    assert meter.peak.host_bytes == large
    assert read_host_memory().peak_bytes == large  # for whoever asks for the peak of the process
    assert meter.peak.allocated_bytes is None


def test_a_system_that_cannot_reset_its_peak_says_so(linux_process):
    linux_process.can_reset = False
    with MemoryMeter("cpu") as meter, meter.phase("one"):
        linux_process.becomes(held=120 * MIB)
    assert meter.phases[0].peak.host_bytes == read_host_memory().peak_bytes == 120 * MIB
    assert "one host peak for the whole process" in meter.table()


def test_of_this_system_it_says_something():
    with MemoryMeter("cpu") as meter, meter.phase("one"):
        pass
    assert meter.phases[0].peak.host_bytes > 0


# --- CUDA ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def driver(cuda_driver, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setattr(device_memory, "_peaks_before", {})
    return cuda_driver(total_memory=1000)


def test_cuda_peaks_by_phase_and_what_others_would_have_read(driver):
    driver.hold(500, 600)
    driver.hold(10, 600)
    torch.cuda.empty_cache()
    with MemoryMeter() as meter:
        with meter.phase("forward"):
            driver.hold(60, 80)
            driver.hold(20, 80)
        with meter.phase("backward"):
            driver.hold(40, 80)
        with meter.phase("forward"):
            driver.hold(30, 80)
    forward, backward = meter.phases
    assert (forward.peak.allocated_bytes, forward.peak.reserved_bytes) == (60, 80)
    assert (backward.peak.allocated_bytes, backward.now.allocated_bytes) == (40, 40)
    assert (forward.peak.process_bytes, forward.runs) == (130, 2)  # with a context of 50
    assert forward.peak.fragmentation == pytest.approx(0.25)
    assert meter.peak.allocated_bytes == 60
    assert meter.peak_since_start.allocated_bytes == 500
    assert torch.cuda.max_memory_allocated() == 30  # of the last stretch
    assert read_device_memory(CUDA).peak_bytes == 500


def test_the_process_had_more_where_reserved_memory_was_given_back(driver):
    with MemoryMeter() as meter, meter.phase("one"):
        driver.hold(60, 800)
        torch.cuda.empty_cache()
    assert meter.peak.process_bytes == 850


def test_meters_within_meters_lose_nothing(driver):
    with MemoryMeter(label="theirs") as outer, outer.phase("train"):
        driver.hold(70, 80)
        driver.hold(5, 80)
        with MemoryMeter(label="ours") as inner:
            with inner.phase("step"):
                driver.hold(30, 80)
            begin_phase(CUDA)  # whoever else lets peaks begin anew
    assert outer.phases[0].peak.allocated_bytes == 70
    assert (inner.phases[0].peak.allocated_bytes, inner.peak.allocated_bytes) == (30, 30)


def test_a_meter_within_a_phase_of_training_takes_nothing_from_it(driver):
    peaks = PhasePeaks(CUDA)
    with peaks.during("step"):
        driver.hold(70, 90)
        driver.hold(5, 80)
        with MemoryMeter() as meter:
            driver.hold(30, 80)
    assert peaks.by_phase == {"step": 70}
    assert meter.peak.allocated_bytes == 30


def test_the_table_is_80_columns_wide_and_the_json_has_its_bytes(driver):
    name = "a phase with a name that is far too long for its column"
    with MemoryMeter(label="a run") as meter, meter.phase(name):
        driver.hold(1023 * MIB, 1023 * MIB)
        meter.mark("loaded")
    table = meter.table()
    assert max(map(len, table.splitlines())) <= 80
    assert "1023 MiB" in table
    assert "too long for its column"[-8:] in table
    facts = json.loads(meter.to_json())
    assert facts["label"] == "a run"
    assert facts["phases"][1]["is_mark"]
    assert facts["phases"][1]["now"]["allocated_bytes"] == 1023 * MIB
    assert facts["peak"]["fragmentation"] == 0


# --- a virtual GPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [None, "cuda", "its own"])
def test_inside_a_virtual_gpu_the_meter_agrees_with_its_report(device):
    with VirtualGPU("t4") as gpu, MemoryMeter(gpu.device if device == "its own" else device) as meter:
        with meter.phase("load"):
            model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
            optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            with meter.phase("step"):
                loss = model(torch.randn(64, 512, device="cuda")).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    report = gpu.report()
    assert meter.peak.allocated_bytes == report.allocated_peak_bytes
    assert meter.peak.reserved_bytes == report.reserved_peak_bytes
    assert meter.peak.process_bytes == report.process_peak_bytes
    load, step = meter.phases
    assert load.peak.allocated_bytes < step.peak.allocated_bytes == report.allocated_peak_bytes
    assert meter.peak.host_bytes is None  # of the tracing process: it says nothing about the run


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_mistakes_are_explained():
    meter = MemoryMeter("cpu")
    with pytest.raises(UserError, match="inside its block"):
        meter.mark("too early")
    with meter:
        pass
    with pytest.raises(UserError, match="one block"), meter:
        pass


def test_a_device_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="no CUDA device here"):
        MemoryMeter("cuda")
    with pytest.raises(UserError, match="got the device meta"):
        MemoryMeter("meta")
    with VirtualGPU("t4"), pytest.raises(UserError, match="the last device that torch finds here is cuda:0"):
        MemoryMeter("cuda:3")
