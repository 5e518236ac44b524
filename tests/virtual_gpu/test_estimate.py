"""A trace in numbers: what is reserved under limits, and what fits."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.catalog.gpus import load_gpus
from lowmem_ft.memory.estimate import BudgetVerdict, MemoryEstimate, ModelSize
from lowmem_ft.memory.timeline import Allocation, Timeline
from lowmem_ft.units import GIB, MIB
from lowmem_ft.virtual_gpu.estimate import Surroundings, estimate_on_cpu, estimate_on_gpu
from lowmem_ft.virtual_gpu.trace import Trace

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
    trace: Trace, limit: int = GIB, allowed: int | None = None, host: int | None = None, host_base: int = 0
) -> MemoryEstimate:
    surroundings = Surroundings(
        outside_bytes={"CUDA context": CONTEXT}, allowed_bytes=allowed, host_base_bytes=host_base
    )
    return estimate_on_gpu(trace, GPU, BudgetVerdict(device_bytes=limit, host_bytes=host), surroundings)


def retries(found: MemoryEstimate) -> list[str]:
    return [choice for choice in found.choices if "empty its cache" in choice]


def test_a_process_is_what_is_reserved_and_what_lies_outside():
    found = estimate(trace_of(300, 300))
    assert found.reserved_peak_bytes == 600 * MIB
    assert found.process_peak_bytes == 700 * MIB
    assert found.fits
    assert found.headroom_bytes == GIB - 700 * MIB
    assert retries(found) == []


def test_it_fits_up_to_the_last_byte_of_the_budget():
    trace = trace_of(300, 300)
    assert estimate(trace, limit=700 * MIB).fits
    over = estimate(trace, limit=700 * MIB - 1)
    assert not over.fits
    assert over.headroom_bytes == -1


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
    assert estimate(trace, limit=600 * MIB).reserved_peak_bytes == 850 * MIB
    capped = estimate(trace, limit=600 * MIB, allowed=600 * MIB)
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
    assert estimate(trace_of(300, place="managed")).process_peak_bytes == 400 * MIB
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
    [(None, None, True), (300, None, True), (299, None, False), (None, 299, False), (300, 300, True)],
)
def test_on_a_processor_both_budgets_are_the_hosts(device, host, fits):
    budget = BudgetVerdict(device_bytes=device and device * MIB, host_bytes=host and host * MIB)
    surroundings = Surroundings(host_base_bytes=200 * MIB)
    found = estimate_on_cpu(trace_of(60, 40), "cpu", budget, surroundings)
    assert found.allocated_peak_bytes == found.reserved_peak_bytes == 100 * MIB
    assert found.process_peak_bytes == found.host_peak_bytes == 300 * MIB
    assert found.step is None
    assert found.fits is fits
