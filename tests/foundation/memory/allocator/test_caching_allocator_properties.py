"""What holds for the caching allocator whatever a program asks for."""

from contextlib import suppress
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator, OutOfMemory
from lowmem_ft.foundation.units import MIB

SIZES = st.one_of(
    st.integers(0, 4096),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 80 * MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB, 10 * MIB - 1, 20 * MIB, 40 * MIB]),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 2)),
        st.tuples(st.just("free"), st.integers(0, 2**16), st.just(0)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    min_size=30,  # short programs, which Hypothesis likes best, never come near a limit
    max_size=80,
)
CONFIGS = st.builds(
    AllocatorConfig,
    expandable_segments=st.booleans(),
    large_segment_size_bytes=st.sampled_from([20 * MIB, 32 * MIB]),
    max_split_size_bytes=st.sampled_from([None, 32 * MIB, 41 * MIB]),
    max_non_split_rounding_bytes=st.sampled_from([None, 40 * MIB]),
    roundup_power2_divisions=st.sampled_from([(0,) * 16, (4,) * 16, (2, 8) + (1,) * 14]),
    garbage_collection_threshold=st.sampled_from([0.0, 0.3, 0.8]),
)
LIMITS = st.one_of(st.none(), st.integers(1, 400 * MIB))


def run(allocator, steps):
    """Sizes, streams and blocks that are alive, after every step."""
    live = []
    for kind, value, stream in steps:
        if kind == "malloc":
            with suppress(OutOfMemory):
                live.append((value, stream, allocator.malloc(value, stream)))
        elif kind == "free" and live:
            allocator.free(live.pop(value % len(live))[2])
        elif kind == "empty_cache":
            allocator.empty_cache()
        yield live


def blocks(allocator):
    return [block for segment in allocator.segments() for block in segment.blocks]


def spans(allocator):
    return [(block.address, block.size) for block in blocks(allocator)]


@settings(max_examples=150)
@given(config=CONFIGS, steps=STEPS, capacity=LIMITS, allowed=LIMITS)
def test_memory_is_conserved_after_every_step(config, steps, capacity, allowed):
    allocator = CachingAllocator(config, capacity_bytes=capacity, allowed_bytes=allowed)
    for live in run(allocator, steps):
        segments = allocator.segments()
        assert allocator.reserved_bytes == sum(segment.size for segment in segments)
        assert all(segment.size == sum(block.size for block in segment.blocks) for segment in segments)
        assert allocator.allocated_bytes == sum(block.size for _, _, block in live)
        in_use = {
            (block.address, block.size, block.requested_bytes, segment.stream)
            for segment in segments
            for block in segment.blocks
            if block.is_allocated
        }
        assert in_use == {(block.address, block.size, size, stream) for size, stream, block in live if size}


@settings(max_examples=100)
@given(config=CONFIGS, steps=STEPS, capacity=LIMITS, allowed=LIMITS)
def test_no_two_blocks_overlap_and_each_holds_what_was_asked_for(config, steps, capacity, allowed):
    allocator = CachingAllocator(config, capacity_bytes=capacity, allowed_bytes=allowed)
    for live in run(allocator, steps):
        ordered = sorted(spans(allocator))
        assert all(address + size <= following for (address, size), (following, _) in pairwise(ordered))
        assert all(block.size >= size for size, _, block in live)


@settings(max_examples=100)
@given(config=CONFIGS, steps=STEPS, capacity=LIMITS, allowed=LIMITS)
def test_limits_and_peaks_hold(config, steps, capacity, allowed):
    allocator = CachingAllocator(config, capacity_bytes=capacity, allowed_bytes=allowed)
    page = config.large_segment_size_bytes if config.expandable_segments else 0
    for _ in run(allocator, steps):
        assert allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.allocated_bytes <= allocator.peak_allocated_bytes
        assert allocator.reserved_bytes <= allocator.peak_reserved_bytes
        assert capacity is None or allocator.peak_reserved_bytes <= capacity
        assert allowed is None or allocator.peak_reserved_bytes <= allowed + page


@settings(max_examples=100)
@given(config=CONFIGS, steps=STEPS, capacity=LIMITS)
def test_everything_goes_back_in_the_end(config, steps, capacity):
    allocator = CachingAllocator(config, capacity_bytes=capacity)
    live = []
    for live in run(allocator, steps):  # noqa: B007
        pass
    for _, _, block in live:
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.segments()) == (0, 0, [])


@settings(max_examples=100)
@given(config=CONFIGS, steps=STEPS, capacity=LIMITS, allowed=LIMITS)
def test_the_trace_alone_tells_what_is_held_and_asked_for(config, steps, capacity, allowed):
    trace = []
    allocator = CachingAllocator(config, capacity_bytes=capacity, allowed_bytes=allowed, trace=trace)
    live = []
    for live in run(allocator, steps):  # noqa: B007
        pass
    sums = dict.fromkeys(
        ("segment_alloc", "segment_map", "segment_free", "segment_unmap", "alloc", "free_completed"), 0
    )
    for entry in trace:
        if entry.action in sums:
            sums[entry.action] += entry.size
    taken, given_back = (
        sums["segment_alloc"] + sums["segment_map"],
        sums["segment_free"] + sums["segment_unmap"],
    )
    assert taken - given_back == allocator.reserved_bytes
    assert sums["alloc"] - sums["free_completed"] == sum(size for size, _, _ in live)


@settings(max_examples=100)
@given(config=CONFIGS, steps=STEPS)
def test_a_limit_changes_nothing_before_it_is_reached(config, steps):
    free = CachingAllocator(config)
    for _ in run(free, steps):
        pass
    limited = CachingAllocator(config, capacity_bytes=free.peak_reserved_bytes)
    for _ in run(limited, steps):
        pass
    assert limited.num_retries == 0
    assert [(block.requested_bytes, block.is_allocated) for block in blocks(limited)] == [
        (block.requested_bytes, block.is_allocated) for block in blocks(free)
    ]
    assert spans(limited) == spans(free)
