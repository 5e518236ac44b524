"""A timeline replayed by the allocator: counters after every event, peaks and the event that does not fit."""

from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.allocator.replay import Replaying, replay
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.units import MIB


def in_mib(counters):
    return [num_bytes / MIB for num_bytes in counters]


def timeline_of_a_step():
    timeline = Timeline()
    weight = timeline.malloc(Allocation(size_bytes=30 * MIB))
    activation = timeline.malloc(Allocation(size_bytes=11 * MIB))
    timeline.free(activation)
    timeline.empty_cache()
    timeline.malloc(Allocation(size_bytes=5 * MIB))
    timeline.free(weight)
    return timeline


def test_counters_after_every_event():
    result = replay(timeline_of_a_step(), CachingAllocator())
    assert in_mib(result.allocated_bytes) == [30, 42, 30, 30, 35, 5]
    assert in_mib(result.reserved_bytes) == [30, 42, 42, 30, 50, 50]
    assert in_mib(result.block_bytes) == [30, 12, 5]


def test_peaks_and_the_events_that_first_reached_them():
    result = replay(timeline_of_a_step(), CachingAllocator())
    assert (result.peak_allocated_bytes, result.peak_allocated_at) == (42 * MIB, 1)
    assert (result.peak_reserved_bytes, result.peak_reserved_at) == (50 * MIB, 4)
    assert (result.out_of_memory, result.out_of_memory_at, result.num_retries) == (None, None, 0)


def test_of_equal_peaks_the_first_counts():
    timeline = Timeline()
    for _ in range(2):
        timeline.free(timeline.malloc(Allocation(size_bytes=MIB)))
    assert replay(timeline, CachingAllocator()).peak_allocated_at == 0


def test_an_empty_timeline_has_no_peak():
    result = replay(Timeline(), CachingAllocator())
    assert (result.peak_allocated_bytes, result.peak_allocated_at) == (0, None)
    assert (result.peak_reserved_bytes, result.peak_reserved_at) == (0, None)


def test_only_the_places_asked_for_are_served():
    timeline = Timeline()
    host = timeline.malloc(Allocation(size_bytes=5 * MIB, place="host"))
    timeline.malloc(Allocation(size_bytes=10 * MIB))
    timeline.free(host)
    result = replay(timeline, CachingAllocator())
    assert in_mib(result.allocated_bytes) == [0, 10, 10]
    assert in_mib(result.block_bytes) == [0, 10]
    both = replay(timeline, CachingAllocator(), places=("device", "host"))
    assert in_mib(both.allocated_bytes) == [5, 15, 10]


def test_streams_do_not_share_memory():
    timeline = Timeline()
    timeline.free(timeline.malloc(Allocation(size_bytes=20 * MIB, stream=1)))
    timeline.malloc(Allocation(size_bytes=20 * MIB, stream=2))
    assert replay(timeline, CachingAllocator()).peak_reserved_bytes == 40 * MIB


def test_it_ends_at_the_request_that_does_not_fit():
    result = replay(timeline_of_a_step(), CachingAllocator(capacity_bytes=45 * MIB))
    assert result.out_of_memory_at == 4
    assert result.out_of_memory is not None
    assert result.out_of_memory.requested_bytes == 5 * MIB
    assert in_mib(result.allocated_bytes) == [30, 42, 30, 30]
    assert (result.peak_reserved_bytes, result.num_retries) == (42 * MIB, 1)


def test_retries_are_counted():
    timeline = Timeline()
    timeline.free(timeline.malloc(Allocation(size_bytes=30 * MIB)))
    timeline.malloc(Allocation(size_bytes=40 * MIB))
    result = replay(timeline, CachingAllocator(capacity_bytes=50 * MIB))
    assert (result.num_retries, result.out_of_memory) == (1, None)
    assert in_mib(result.reserved_bytes) == [30, 30, 40]


def test_expandable_segments_reserve_less_for_growing_sizes():
    timeline = Timeline()
    for size in range(20, 60, 2):
        timeline.free(timeline.malloc(Allocation(size_bytes=size * MIB)))
    expandable = CachingAllocator(AllocatorConfig(expandable_segments=True))
    assert replay(timeline, expandable).peak_reserved_bytes == 60 * MIB
    assert replay(timeline, CachingAllocator()).peak_reserved_bytes == sum(range(20, 60, 2)) * MIB


def test_a_replay_goes_on_with_another_timeline_as_if_it_had_served_that_from_the_start():
    for config in (AllocatorConfig(), AllocatorConfig(expandable_segments=True)):
        timeline = a_step_and_a_half()
        longer = Timeline([*timeline.allocations], timeline.events[:5])
        for size in (3, 40, 12):
            longer.malloc(Allocation(size_bytes=size * MIB))
        longer.free(0)
        longer.malloc(Allocation(size_bytes=25 * MIB))
        replaying = Replaying(timeline, CachingAllocator(config))
        replaying.run(until=5)
        peak, reserved = replaying.reserved_bytes_on(longer)
        whole = replay(longer, CachingAllocator(config))
        assert peak == whole.peak_reserved_bytes
        assert reserved == whole.reserved_bytes[5:]
        replaying.run()
        assert replaying.counters() == replay(timeline, CachingAllocator(config))


def a_step_and_a_half():
    """Blocks in use, cached ones between them, and one without bytes."""
    timeline = Timeline()
    for size in (12 * MIB, 3 * MIB, 0):
        timeline.malloc(Allocation(size_bytes=size))
    timeline.free(1)
    timeline.malloc(Allocation(size_bytes=MIB))
    timeline.free(2)
    timeline.malloc(Allocation(size_bytes=7 * MIB))
    return timeline
