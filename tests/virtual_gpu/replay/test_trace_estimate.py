"""A trace in numbers: what is reserved under limits, and what fits."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch
from torch import nn

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.memory_estimate import BudgetVerdict, MemoryEstimate, ModelSize
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.memory.uncertainty import QUANTIZED_RESERVED_SHARE, RESERVED_SHARE
from lowmem_ft.foundation.units import GIB, MIB, format_bytes
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import STEP_END, Work
from lowmem_ft.virtual_gpu.costs.workspaces import CUBLAS_WORKSPACES_BYTES
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.host_peak import HostOutside, HostTensors
from lowmem_ft.virtual_gpu.replay.other_workspaces import with_workspaces
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.replay.trace_estimate import (
    OTHERS,
    EstimateContext,
    allocator_config_of_runs,
    estimate_on_cpu,
    estimate_on_gpu,
    step_time,
)

GPU = dataclasses.replace(load_gpus()["l4"], memory_bytes=GIB)
CONTEXT = 100 * MIB


@pytest.fixture(autouse=True)
def _plain_allocator(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)


def trace_of(*sizes_mib: int, kept: bool = True, place="device") -> Trace:
    """Allocations one after another; if not kept, each is freed before the next and leaves a cached segment."""
    timeline = Timeline()
    for size in sizes_mib:
        index = timeline.malloc(Allocation(size_bytes=size * MIB, place=place))
        if not kept:
            timeline.free(index)
    return Trace(timeline=timeline, work=[], model=ModelSize(name="m", parameters=1, trainable_parameters=1))


def estimate(
    trace: Trace,
    limit: int = GIB,
    allowed: int | None = None,
    host: int | None = None,
    host_base: int = 0,
    others: int | None = None,
    gpu: Gpu = GPU,
) -> MemoryEstimate:
    context = EstimateContext(
        outside_bytes={"CUDA context": CONTEXT},
        allowed_bytes=allowed,
        host=HostOutside(process_bytes=host_base),
    )
    gpu = dataclasses.replace(gpu, held_by_others_bytes=others)
    return estimate_on_gpu(trace, gpu, BudgetVerdict(device_bytes=limit, host_bytes=host), context)


@pytest.mark.parametrize(
    "kernel, is_like", [({"flops": 10**13, "dtype": "bfloat16"}, True), ({"num_bytes": 10**10}, False)]
)
def test_a_step_unlike_those_that_were_timed_has_a_wider_range(kernel, is_like):
    work = [
        Work("mark", 0, name=STEP_END),
        Work("kernel", 0, name="mul", **kernel),
        Work("mark", 0, name=STEP_END),
    ]
    gpu = find_gpu("a100-80gb")
    replays = Replays(dataclasses.replace(trace_of(), work=work), allocator_config_of_runs(gpu))
    step = step_time(replays, gpu, EstimateContext(outside_bytes={}))
    assert step is not None
    assert step.unlike_measured == (() if is_like else ("element-wise",))
    assert step.seconds_share == gpu.rates.share_with(step.by_kind)
    assert (step.seconds_share < 1.1 * gpu.rates.seconds_share) == is_like


def high_of(found: MemoryEstimate) -> int:
    assert found.process_range is not None
    return found.process_range.high_bytes


def retries(found: MemoryEstimate) -> list[str]:
    return [choice for choice in found.choices if "empty its cache" in choice]


def test_a_process_is_what_is_reserved_and_what_lies_outside():
    found = estimate(trace_of(300, 300))
    assert found.reserved_peak_bytes == 600 * MIB
    assert found.process_peak_bytes == 700 * MIB
    assert found.fits
    assert found.headroom_bytes == GIB - 700 * MIB
    assert retries(found) == []


def test_it_fits_up_to_the_last_byte_of_the_upper_end():
    trace = trace_of(300, 300)
    most = high_of(estimate(trace))
    assert most == round(600 * MIB * (1 + RESERVED_SHARE)) + 110 * MIB  # and a tenth of the context
    assert estimate(trace, limit=most).fits
    over = estimate(trace, limit=most - 1)
    assert not over.fits
    assert over.headroom_bytes == most - 700 * MIB - 1 > 0  # the figure itself has room


def test_it_may_not_fit_where_the_limit_is_within_the_range():
    trace = trace_of(300, 300)
    around = estimate(trace).process_range
    assert around is not None
    lowest, highest = around.low_bytes, around.high_bytes
    found = {
        limit: estimate(trace, limit=limit).verdict for limit in (lowest - 1, lowest, highest - 1, highest)
    }
    assert list(found.values()) == ["does not fit", "may not fit", "may not fit", "fits"]
    straddles = estimate(trace, limit=lowest)
    assert not straddles.fits
    assert straddles.to_json()["verdict"] == "may not fit"
    assert f"may not fit, {format_bytes(700 * MIB - lowest)} are missing" in str(straddles)
    assert estimate(trace, limit=lowest, host=GIB, host_base=GIB + 1).verdict == "does not fit"


def test_on_a_processor_it_may_not_fit_likewise():
    trace = trace_of(300, 300)

    def verdict(limit: int | None) -> str:
        budget = BudgetVerdict(device_bytes=None, host_bytes=limit)
        context = EstimateContext(host=HostOutside(process_bytes=500 * MIB))
        return estimate_on_cpu(trace, "cpu", budget, context).verdict

    found = {limit and limit // MIB: verdict(limit) for limit in (None, 1000 * MIB, 1100 * MIB, 1200 * MIB)}
    assert found == {None: "fits", 1000: "does not fit", 1100: "may not fit", 1200: "fits"}


def test_the_range_lies_around_the_figure():
    found = estimate(trace_of(300, 300))
    assert found.process_range is not None
    assert found.process_range.low_bytes == round(600 * MIB * (1 - RESERVED_SHARE)) + 90 * MIB
    device = found.to_json()["device"]
    assert device["process_low_bytes"] < device["process_peak_bytes"] < device["process_high_bytes"]


def test_what_is_less_certain_has_a_wider_range():
    def width(trace: Trace, gpu: Gpu = GPU) -> int:
        return high_of(estimate(trace, gpu=gpu)) - 700 * MIB

    plain = trace_of(300, 300)
    assert (
        width(dataclasses.replace(plain, is_quantized=True))
        == round(600 * MIB * QUANTIZED_RESERVED_SHARE) + 10 * MIB
    )
    estimated_context = dataclasses.replace(GPU, context_is_estimate=True)
    assert width(plain, estimated_context) == round(600 * MIB * RESERVED_SHARE) + 25 * MIB
    assert estimate(plain, gpu=estimated_context).to_json()["gpu"]["context_is_estimate"]


@pytest.mark.parametrize("share,tight", [(0.05, True), (0.07, False)])
def test_what_fits_with_little_to_spare_is_tight(share, tight):
    trace = trace_of(300, 300)
    found = estimate(trace, limit=round(700 * MIB / (1 - share)))
    assert (found.fits, found.tight) == (True, tight)
    assert (found.to_json()["fits"], found.to_json()["tight"]) == (True, tight)
    host = estimate(trace, host=round(GIB / (1 - share)), host_base=GIB)
    assert (host.fits, host.tight) == (True, tight)


def test_what_does_not_fit_is_not_tight():
    found = estimate(trace_of(300, 300), limit=705 * MIB)
    assert (found.fits, found.tight) == (False, False)


def test_a_cache_that_can_be_emptied_makes_up_for_the_uncertainty():
    """1010 of 1024 MiB, and 1028 at the upper end: the allocator would give back what is cached."""
    found = estimate(trace_of(400, 510, kept=False))
    assert found.process_peak_bytes == 1010 * MIB
    assert found.fits
    assert found.tight
    assert high_of(found) <= GIB
    assert not estimate(trace_of(400, 510)).fits


def test_what_others_hold_is_not_there():
    trace = trace_of(300, 300)
    alone, crowded = estimate(trace, others=0), estimate(trace, others=400 * MIB)
    assert alone.fits
    assert not crowded.fits
    assert crowded.process_peak_bytes == alone.process_peak_bytes
    assert crowded.to_json()["gpu"]["held_by_others_bytes"] == 400 * MIB
    assert OTHERS in estimate(trace).not_modelled
    assert OTHERS not in alone.not_modelled


@pytest.mark.parametrize("groups, number", [(1, 2), (4, 2), (8, 0)])
def test_workspaces_of_cudnns_convolutions_are_said_to_be_left_out(groups, number):
    """Depthwise ones are torch's own kernels, which take none."""
    with VirtualGPU("t4") as gpu:
        model = nn.Sequential(
            nn.Linear(32, 32), *(nn.Conv1d(8, 8, 3, groups=groups) for _ in range(2))
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.randn(2, 8, 32, device="cuda")).sum().backward()
            optimizer.step()
    said = [text for text in gpu.report().not_modelled if "cuDNN" in text]
    assert [f"({number} in a traced step)" in text for text in said] == [True] * bool(number)


def test_the_allocator_empties_its_cache_beside_others():
    trace = trace_of(300, 350, kept=False)
    assert retries(estimate(trace, others=0)) == []
    assert retries(estimate(trace, others=400 * MIB))


def test_a_cache_that_has_to_be_emptied_on_the_way_still_fits_and_is_said():
    found = estimate(trace_of(400, 500, 600, kept=False))
    assert found.fits
    assert found.reserved_peak_bytes == 900 * MIB
    assert found.process_peak_bytes <= GIB
    assert retries(found) == [
        "the allocator has to empty its cache 1 times to stay within the limit, which costs time; "
        "PYTORCH_ALLOC_CONF=expandable_segments:True needs less"
    ]


def test_what_runs_out_of_memory_shows_what_it_would_have_needed():
    found = estimate(trace_of(600, 600))
    assert not found.fits
    assert found.reserved_peak_bytes == 1200 * MIB
    assert found.headroom_bytes == GIB - 1300 * MIB


def test_a_capped_allocator_empties_its_cache_at_the_cap():
    trace = trace_of(200, 300, 350, kept=False)
    assert estimate(trace, limit=620 * MIB).reserved_peak_bytes == 850 * MIB
    capped = estimate(trace, limit=620 * MIB, allowed=600 * MIB)
    assert capped.fits
    assert capped.reserved_peak_bytes == 500 * MIB
    assert retries(capped)


def test_a_capped_allocator_within_its_cap_may_leave_the_process_above_the_budget():
    found = estimate(trace_of(300, 300), limit=650 * MIB, allowed=650 * MIB)
    assert found.process_peak_bytes == 700 * MIB
    assert not found.fits


def test_a_program_that_caps_itself_too_low_does_not_run_on_the_largest_gpu():
    assert not estimate(trace_of(300, 300), allowed=500 * MIB).fits


def test_managed_memory_takes_what_is_left_and_the_rest_moves_to_the_host():
    found = estimate(trace_of(300, place="managed"))
    assert (found.process_peak_bytes, found.paged_peak_bytes) == (400 * MIB, 300 * MIB)
    assert estimate(trace_of(300)).paged_peak_bytes == 0
    spilled = estimate(trace_of(5000, place="managed"))
    assert spilled.process_peak_bytes == GIB
    assert spilled.fits


def test_the_host_has_a_budget_of_its_own():
    trace = trace_of(100, place="pinned")
    found = estimate(trace, host=300 * MIB, host_base=200 * MIB)
    assert (found.host_peak_bytes, found.host_pinned_bytes) == (300 * MIB, 100 * MIB)
    assert found.fits
    assert not estimate(trace, host=300 * MIB - 1, host_base=200 * MIB).fits


@pytest.mark.parametrize(
    "device,host,fits",
    [(None, None, True), (324, None, True), (323, None, False), (None, 323, False), (324, 324, True)],
)
def test_on_a_processor_both_budgets_are_the_hosts(device, host, fits):
    budget = BudgetVerdict(device_bytes=device and device * MIB, host_bytes=host and host * MIB)
    context = EstimateContext(host=HostOutside(process_bytes=200 * MIB))
    found = estimate_on_cpu(trace_of(60, 20), "cpu", budget, context)
    assert found.allocated_peak_bytes == 80 * MIB
    assert found.reserved_peak_bytes == 86 * MIB  # three tenths of what is below 32 MiB
    assert found.process_peak_bytes == found.host_peak_bytes == 286 * MIB  # 6 and 16% of 200 more or less
    assert found.step is None
    assert found.fits is fits


def test_the_hosts_peak_is_that_of_loading_or_that_of_the_run_with_files_being_written():
    timeline = Timeline()
    read = timeline.malloc(Allocation(size_bytes=50, category="parameter", phase="load", place="host"))
    timeline.malloc(Allocation(size_bytes=30, category="parameter", phase="load", place="pinned"))
    timeline.free(read)
    timeline.malloc(Allocation(size_bytes=20, category="gradient", phase="backward", place="pinned"))
    timeline.malloc(Allocation(size_bytes=99, category="gradient", phase="backward"))
    tensors = HostTensors.of(timeline)
    loading = tensors.peak_with(HostOutside(process_bytes=5, loading_bytes=10))
    assert loading == {"parameter": 80, "process": 5, "loading": 10}
    saving = tensors.peak_with(HostOutside(process_bytes=5, loading_bytes=10, saving_bytes=60))
    assert saving == {"parameter": 30, "gradient": 20, "process": 5, "saving": 60}


def test_replays_with_other_workspaces_share_what_these_do_not_change():
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=3 * MIB, category="parameter", phase="load", place="pinned"))
    for size in CUBLAS_WORKSPACES_BYTES:
        timeline.malloc(Allocation(size_bytes=size, category="workspace"))
    work = [
        Work("copy", 2, 1, "copy_", num_bytes=10**6),
        Work("record", 2, 1, event=7),
        Work("wait", 2, 0, event=7),
        Work("kernel", 2, 0, "mm", flops=10**9, dtype="bfloat16"),
        Work("mark", 3, name=STEP_END),
    ]
    traces = [
        Trace(timeline=timeline, work=work, model=ModelSize(name="m", parameters=1, trainable_parameters=1))
    ]
    traces += [with_workspaces(traces[0], size) for size in sorted(CUBLAS_WORKSPACES_BYTES)]
    first = Replays(traces[0], AllocatorConfig())
    arguments = (
        GPU,
        BudgetVerdict(device_bytes=None, host_bytes=None),
        EstimateContext(allocator=AllocatorConfig()),
    )
    reserved = []
    for trace in traces[1:]:
        shared = Replays(trace, AllocatorConfig(), alike=first)
        assert shared.clock is first.clock
        together = estimate_on_gpu(trace, *arguments, replays=shared)
        assert together == estimate_on_gpu(trace, *arguments)
        reserved.append(together.reserved_peak_bytes)
    assert len(set(reserved)) == len(reserved), "their memory differs"


def test_the_parts_of_the_hosts_peak_sum_to_it():
    found = estimate(trace_of(100, 20, place="pinned"), host_base=200 * MIB)
    host = found.to_json()["host"]
    assert sum(host["by_part_at_peak"].values()) == host["peak_bytes"] == 320 * MIB


def test_versions_name_the_libraries_that_move_the_result():
    versions = estimate(trace_of(1)).versions
    assert {"torch", "transformers", "accelerate"} <= versions.keys()
    for library in ("peft", "bitsandbytes"):
        assert (library in versions) == (importlib.util.find_spec(library) is not None)
