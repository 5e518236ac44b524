"""Who holds the memory at a moment, and how much each phase needs."""

from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.allocator.replay import replay
from lowmem_ft.foundation.memory.analysis import allocation_at, categories_at, peak_by_phase
from lowmem_ft.foundation.memory.category import CATEGORIES
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.units import MIB


def step():
    """Weights, an activation that becomes a gradient's worth of memory, and a batch on the host."""
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=11 * MIB, category="parameter", phase="load"))
    timeline.malloc(Allocation(size_bytes=MIB, category="input", phase="forward", place="host"))
    activation = timeline.malloc(
        Allocation(size_bytes=100, category="activation", phase="forward", module="model.layers.0")
    )
    timeline.malloc(
        Allocation(size_bytes=30 * MIB, category="gradient", phase="backward", module="model.layers.0.mlp")
    )
    timeline.free(activation)
    timeline.empty_cache()
    timeline.malloc(Allocation(size_bytes=MIB, category="optimizer_state", phase="optimizer_step"))
    return timeline


def test_categories_at_the_peak_sum_to_the_peak_of_the_allocator():
    timeline = step()
    result = replay(timeline, CachingAllocator())
    categories = categories_at(timeline, result.peak_allocated_at, result.block_bytes)
    assert sum(categories.values()) == result.peak_allocated_bytes
    assert categories["parameter"] == 12 * MIB  # the rest of 1 MiB that the allocator does not split off
    assert categories["optimizer_state"] == MIB
    assert categories["activation"] == 0  # freed before


def test_categories_sum_to_what_is_allocated_after_every_event():
    timeline = step()
    result = replay(timeline, CachingAllocator())
    for position, allocated in enumerate(result.allocated_bytes):
        assert sum(categories_at(timeline, position, result.block_bytes).values()) == allocated


def test_every_category_is_there():
    timeline = step()
    sizes = [allocation.size_bytes for allocation in timeline.allocations]
    categories = categories_at(timeline, 2, sizes)
    assert tuple(categories) == CATEGORIES
    assert (categories["activation"], categories["input"]) == (100, MIB)


def test_a_phase_keeps_the_bytes_that_it_begins_with():
    timeline = step()
    result = replay(timeline, CachingAllocator())
    assert peak_by_phase(timeline, result.allocated_bytes) == {
        "load": 12 * MIB,
        "forward": 12 * MIB + 512,
        "backward": 42 * MIB + 512,
        "optimizer_step": 43 * MIB,
    }


def test_a_free_belongs_to_the_phase_of_the_allocation_before_it():
    timeline = Timeline()
    kept = timeline.malloc(Allocation(size_bytes=4, phase="forward"))
    timeline.malloc(Allocation(size_bytes=1, phase="backward"))
    timeline.free(kept)
    assert peak_by_phase(timeline, list(timeline.live_bytes())) == {"forward": 4, "backward": 5}


def test_phases_after_the_event_that_did_not_fit_are_missing():
    timeline = step()
    result = replay(timeline, CachingAllocator(capacity_bytes=20 * MIB))
    assert tuple(peak_by_phase(timeline, result.allocated_bytes)) == ("load", "forward")


def test_the_allocation_at_the_peak_names_phase_and_module():
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=4, phase="forward", module="model.embed_tokens"))
    timeline.free(timeline.malloc(Allocation(size_bytes=4, phase="backward", module="lm_head")))
    timeline.empty_cache()
    peak = replay(timeline, CachingAllocator()).peak_allocated_at
    assert allocation_at(timeline, peak) is timeline.allocations[1]
    assert allocation_at(timeline, 3) is None
