"""Each rule of PyTorch's caching allocator, by sequences whose outcome follows from its source by hand."""

import pytest

from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator, OutOfMemory
from lowmem_ft.foundation.units import MIB, TIB


def allocator(settings="", **options):
    return CachingAllocator(AllocatorConfig.parse(settings), **options)


def block_sizes(of):
    return [[(block.size, block.is_allocated) for block in segment.blocks] for segment in of.segments()]


# --- rounding and segments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked, got", [(1, 512), (511, 512), (512, 512), (513, 1024), (MIB, MIB)])
def test_sizes_are_rounded_up_to_512_bytes(asked, got):
    assert allocator().malloc(asked).size == got


def test_nothing_is_taken_for_an_empty_tensor():
    it = allocator()
    block = it.malloc(0)
    assert (block.size, it.allocated_bytes, it.reserved_bytes) == (0, 0, 0)
    it.free(block)
    assert it.allocated_bytes == 0


@pytest.mark.parametrize(
    "asked, segment",
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # rounds to 10 MiB: a segment of its own
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segment_size_by_request(asked, segment):
    it = allocator()
    it.malloc(asked)
    assert it.reserved_bytes == segment


def test_large_segment_size_is_a_setting():
    it = allocator("large_segment_size_mb:32")
    it.malloc(5 * MIB)
    assert it.reserved_bytes == 32 * MIB


# Numbers: test_mempool_with_allocator in test/test_cuda.py of PyTorch.
def test_two_requests_of_1_mib_share_a_small_segment_and_a_third_needs_another():
    it = allocator()
    reserved = [it.malloc(MIB) and it.reserved_bytes for _ in range(3)]
    assert reserved == [2 * MIB, 2 * MIB, 4 * MIB]


# --- splitting -------------------------------------------------------------------------------------------------------


def test_a_small_block_is_split_down_to_512_bytes():
    it = allocator()
    it.malloc(MIB)
    it.malloc(MIB - 512)
    assert block_sizes(it) == [[(MIB, True), (MIB - 512, True), (512, False)]]


def test_a_large_rest_of_1_mib_is_not_split_off_and_counts_as_allocated():
    it = allocator()
    it.malloc(11 * MIB)  # of a segment of 12 MiB
    assert it.allocated_bytes == 12 * MIB
    assert block_sizes(it) == [[(12 * MIB, True)]]


def test_a_large_rest_above_1_mib_is_split_off():
    it = allocator()
    it.malloc(11 * MIB - 512)
    assert it.allocated_bytes == 11 * MIB - 512
    assert block_sizes(it) == [[(11 * MIB - 512, True), (MIB + 512, False)]]


def test_large_requests_share_a_20_mib_segment_until_the_rest_is_too_small():
    it = allocator()
    for _ in range(3):
        it.malloc(6 * MIB)  # the third leaves 2 MiB
    assert it.reserved_bytes == 20 * MIB
    it.malloc(2 * MIB)
    assert it.reserved_bytes == 20 * MIB
    it.malloc(2 * MIB)
    assert it.reserved_bytes == 40 * MIB


# --- reuse -----------------------------------------------------------------------------------------------------------


def test_the_best_fit_is_taken_not_the_first():
    it = allocator()
    blocks = [it.malloc(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        it.free(block)
    assert it.malloc(19 * MIB).address == blocks[1].address
    assert it.malloc(30 * MIB).address == blocks[2].address


def test_of_equal_blocks_the_lowest_address_is_taken():
    it = allocator()
    first, second = it.malloc(20 * MIB), it.malloc(20 * MIB)
    it.free(second)
    it.free(first)
    assert it.malloc(20 * MIB).address == min(first.address, second.address)


def test_later_segments_lie_lower():
    it = allocator()
    first, second = it.malloc(20 * MIB), it.malloc(30 * MIB)
    assert second.address + second.size <= first.address


def test_small_requests_never_use_large_blocks():
    it = allocator()
    it.free(it.malloc(20 * MIB))
    it.malloc(512)
    assert it.reserved_bytes == 22 * MIB


def test_a_cached_block_serves_only_its_own_stream():
    it = allocator()
    it.free(it.malloc(20 * MIB, stream=1))
    it.malloc(20 * MIB, stream=2)
    assert it.reserved_bytes == 40 * MIB
    it.malloc(20 * MIB, stream=1)
    assert it.reserved_bytes == 40 * MIB


def test_free_neighbours_merge_in_any_order():
    for order in ((0, 1, 2), (2, 0, 1), (0, 2, 1)):
        it = allocator()
        blocks = [it.malloc(6 * MIB) for _ in range(3)]
        for index in order:
            it.free(blocks[index])
        assert block_sizes(it) == [[(20 * MIB, False)]]


def test_segments_never_merge():
    it = allocator()
    for block in [it.malloc(20 * MIB), it.malloc(20 * MIB)]:
        it.free(block)
    it.malloc(40 * MIB)
    assert it.reserved_bytes == 80 * MIB


def test_a_block_cannot_be_freed_twice():
    it = allocator()
    block = it.malloc(512)
    it.free(block)
    with pytest.raises(AssertionError):
        it.free(block)


# --- giving back -----------------------------------------------------------------------------------------------------


def test_empty_cache_gives_back_whole_segments_only():
    it = allocator()
    kept, freed = it.malloc(6 * MIB), it.malloc(6 * MIB)
    it.free(freed)
    it.free(it.malloc(30 * MIB))
    it.empty_cache()
    assert it.reserved_bytes == 20 * MIB
    it.free(kept)
    it.empty_cache()
    assert it.reserved_bytes == 0
    assert (it.peak_allocated_bytes, it.peak_reserved_bytes) == (36 * MIB, 50 * MIB)


# Course of events: test_out_of_memory_retry in test/test_cuda.py of PyTorch, on a device with room for one and a half.
def test_half_the_memory_fits_once_more_when_the_first_half_was_freed():
    it = allocator(capacity_bytes=60 * MIB)
    first = it.malloc(40 * MIB)
    with pytest.raises(OutOfMemory) as raised:
        it.malloc(40 * MIB)
    failure = raised.value
    assert (failure.requested_bytes, failure.allocated_bytes) == (40 * MIB, 40 * MIB)
    assert (failure.reserved_bytes, failure.capacity_bytes) == (40 * MIB, 60 * MIB)
    it.free(first)
    it.malloc(40 * MIB)
    assert it.reserved_bytes == 40 * MIB


def test_a_failed_request_empties_the_cache_and_is_tried_again():
    it = allocator(capacity_bytes=60 * MIB)
    it.free(it.malloc(20 * MIB))
    it.free(it.malloc(30 * MIB))
    assert it.num_retries == 0
    it.malloc(40 * MIB)
    assert (it.num_retries, it.reserved_bytes) == (1, 40 * MIB)


def test_capacity_counts_segments_not_blocks():
    it = allocator(capacity_bytes=20 * MIB - 1)
    with pytest.raises(OutOfMemory):
        it.malloc(2 * MIB)  # needs a segment of 20 MiB
    it.malloc(MIB)
    assert it.reserved_bytes == 2 * MIB


def test_the_lower_of_capacity_and_allowance_rules():
    it = allocator(capacity_bytes=100 * MIB, allowed_bytes=30 * MIB)
    it.malloc(20 * MIB)
    with pytest.raises(OutOfMemory) as raised:
        it.malloc(20 * MIB)
    assert raised.value.capacity_bytes == 30 * MIB


# --- roundup_power2_divisions ----------------------------------------------------------------------------------------


# Numbers: test_allocator_settings in test/test_cuda.py of PyTorch.
@pytest.mark.parametrize(
    "settings, asked, got",
    [
        ("", 84, 84),
        ("roundup_power2_divisions:4", 84, 96),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 84, 88),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 400, 512),
    ],
)
def test_sizes_round_up_to_divisions_of_a_power_of_two(settings, asked, got):
    assert allocator(settings).malloc(asked * MIB).size == got * MIB


@pytest.mark.parametrize("asked, got", [(700, 1024), (4096, 4096), (4097, 4608), (5000, 5120), (6145, 6656)])
def test_divisions_apply_above_512_bytes_each(asked, got):
    assert allocator("roundup_power2_divisions:8").malloc(asked).size == got


# --- max_split_size --------------------------------------------------------------------------------------------------


def test_an_unsplittable_block_does_not_serve_smaller_requests():
    it = allocator("max_split_size_mb:40")
    it.free(it.malloc(40 * MIB))
    it.malloc(39 * MIB)
    assert it.reserved_bytes == 80 * MIB
    assert it.allocated_bytes == 40 * MIB  # of a segment of 40 MiB, with a rest of 1 MiB that stays on


def test_a_request_of_just_the_limit_is_served_by_an_unsplittable_block():
    it = allocator("max_split_size_mb:40")
    it.free(it.malloc(40 * MIB))
    it.malloc(40 * MIB)
    assert it.reserved_bytes == 40 * MIB


@pytest.mark.parametrize("asked, reserved", [(44, 108), (46, 64), (64, 64)])
def test_an_unsplittable_block_serves_requests_less_than_20_mib_below_it_whole(asked, reserved):
    it = allocator("max_split_size_mb:40")
    it.free(it.malloc(64 * MIB))
    it.malloc(asked * MIB)
    assert it.reserved_bytes == reserved * MIB
    assert it.allocated_bytes == (64 if asked > 44 else 44) * MIB


def test_how_much_below_is_a_setting():
    it = allocator("max_split_size_mb:40,max_non_split_rounding_mb:30")
    it.free(it.malloc(64 * MIB))
    it.malloc(44 * MIB)
    assert it.reserved_bytes == 64 * MIB


def test_on_failure_the_smallest_unsplittable_block_that_covers_the_request_goes_first():
    it = allocator("max_split_size_mb:40", capacity_bytes=250 * MIB)
    for block in [it.malloc(size * MIB) for size in (10, 90, 120)]:
        it.free(block)
    it.malloc(50 * MIB)
    assert it.num_retries == 0, "the cache was not emptied"
    assert it.reserved_bytes == (10 + 120 + 50) * MIB


def test_on_failure_several_unsplittable_blocks_go_the_largest_first():
    it = allocator("max_split_size_mb:40", capacity_bytes=200 * MIB)
    for block in [it.malloc(size * MIB) for size in (10, 50, 60, 70)]:
        it.free(block)
    it.malloc(110 * MIB)
    assert it.num_retries == 0
    assert it.reserved_bytes == (10 + 50 + 110) * MIB


@pytest.mark.parametrize("cached", [(50,), (30, 30)])
def test_on_failure_the_cache_is_emptied_where_unsplittable_blocks_do_not_cover_the_request(cached):
    it = allocator("max_split_size_mb:40", capacity_bytes=105 * MIB)
    it.malloc(30 * MIB)
    for block in [it.malloc(size * MIB) for size in cached]:
        it.free(block)
    it.malloc(60 * MIB)
    assert (it.num_retries, it.reserved_bytes) == (1, 90 * MIB)


# Numbers: test_max_split_expandable in test/test_cuda.py of PyTorch, which caps at 120 MiB.
@pytest.mark.parametrize("expandable", [False, True])
def test_three_times_40_fill_120_mib_and_go_back_for_one_of_120(expandable):
    it = allocator(f"expandable_segments:{expandable},max_split_size_mb:40", allowed_bytes=120 * MIB)
    blocks = [it.malloc(40 * MIB) for _ in range(3)]
    with pytest.raises(OutOfMemory):
        it.malloc(40 * MIB)
    for block in blocks:
        it.free(block)
    it.malloc(120 * MIB)
    assert it.reserved_bytes == 120 * MIB


# --- garbage collection ----------------------------------------------------------------------------------------------


# Numbers: test_garbage_collect_expandable in test/test_cuda.py of PyTorch.
def test_garbage_is_collected_above_the_threshold_before_new_memory_is_taken():
    it = allocator("garbage_collection_threshold:0.5", allowed_bytes=120 * MIB)
    for block in [it.malloc(40 * MIB), it.malloc(40 * MIB)]:
        it.free(block)
    it.malloc(80 * MIB)
    assert (it.reserved_bytes, it.num_retries) == (80 * MIB, 0)


def idle_segments(it, old_size, young_size, other_size):
    """One segment is free for two searches by the time of the next one, another for one; a third is in use."""
    old, young = it.malloc(old_size), it.malloc(young_size)
    it.free(old)
    it.malloc(other_size, stream=1)
    it.free(young)


def test_the_segments_that_idled_longer_than_average_go_first():
    it = allocator("garbage_collection_threshold:0.5", allowed_bytes=200 * MIB)
    idle_segments(it, 60 * MIB, 30 * MIB, 20 * MIB)
    it.malloc(64 * MIB)  # 110 MiB are 10 above the threshold: ages 2 and 1, above the average is the older
    assert it.reserved_bytes == (30 + 20 + 64) * MIB


def test_collection_goes_on_until_the_excess_is_covered():
    it = allocator("garbage_collection_threshold:0.5", allowed_bytes=150 * MIB)
    idle_segments(it, 20 * MIB, 50 * MIB, 40 * MIB)
    it.malloc(54 * MIB)  # 110 MiB are 35 above the threshold, the older covers 20
    assert it.reserved_bytes == (40 + 54) * MIB


def test_small_segments_are_no_garbage():
    it = allocator("garbage_collection_threshold:0.5", allowed_bytes=120 * MIB)
    for block in [it.malloc(512), it.malloc(40 * MIB), it.malloc(40 * MIB)]:
        it.free(block)
    it.malloc(80 * MIB)
    assert it.reserved_bytes == 82 * MIB


def test_segments_partly_in_use_are_no_garbage():
    it = allocator("garbage_collection_threshold:0.5", allowed_bytes=120 * MIB)
    freed, _ = it.malloc(6 * MIB), it.malloc(6 * MIB)
    it.free(freed)
    it.free(it.malloc(50 * MIB))
    it.malloc(80 * MIB)
    assert (it.reserved_bytes, it.num_retries) == (100 * MIB, 0)


def test_without_an_allowance_no_garbage_is_collected():
    it = allocator("garbage_collection_threshold:0.5", capacity_bytes=400 * MIB)
    for block in [it.malloc(40 * MIB) for _ in range(6)]:
        it.free(block)
    it.malloc(80 * MIB)
    assert it.reserved_bytes == 320 * MIB


# --- expandable segments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked, reserved", [(512, 2), (MIB, 2), (MIB + 1, 20), (20 * MIB + 1, 40)])
def test_memory_is_mapped_in_pages_of_2_and_20_mib(asked, reserved):
    it = allocator("expandable_segments:True")
    it.malloc(asked)
    assert it.reserved_bytes == reserved * MIB


def test_an_expandable_segment_grows_by_what_its_tail_lacks():
    it = allocator("expandable_segments:True")
    for _ in range(3):
        it.malloc(30 * MIB)
    assert it.reserved_bytes == 100 * MIB  # 90, in pages of 20
    assert len(it.segments()) == 1
    assert it.allocated_bytes == 90 * MIB


def test_an_expandable_block_is_split_down_to_512_bytes():
    it = allocator("expandable_segments:True")
    it.malloc(20 * MIB - 512)
    assert it.allocated_bytes == 20 * MIB - 512
    assert block_sizes(it) == [[(20 * MIB - 512, True), (512, False)]]


def test_neighbours_that_fixed_segments_would_keep_apart_merge_in_an_expandable_one():
    it = allocator("expandable_segments:True")
    for block in [it.malloc(20 * MIB), it.malloc(20 * MIB)]:
        it.free(block)
    it.malloc(40 * MIB)
    assert it.reserved_bytes == 40 * MIB


def test_a_hole_is_preferred_to_the_tail_that_can_grow():
    it = allocator("expandable_segments:True")
    hole, _ = it.malloc(8 * MIB), it.malloc(6 * MIB)  # the tail keeps 6 MiB
    it.free(hole)
    assert it.malloc(5 * MIB).address == hole.address


def test_each_pool_and_stream_has_its_own_range():
    it = allocator("expandable_segments:True")
    it.malloc(512)
    it.malloc(512, stream=1)
    it.malloc(2 * MIB)
    assert it.reserved_bytes == (2 + 2 + 20) * MIB
    assert [segment.is_small for segment in it.segments()] == [True, True, False]


def test_empty_cache_unmaps_whole_pages_between_blocks_in_use():
    it = allocator("expandable_segments:True")
    blocks = [it.malloc(size * MIB) for size in (10, 60, 10)]
    it.free(blocks[1])  # 10 to 70 MiB: the pages from 20 to 60 are free as a whole
    it.empty_cache()
    assert it.reserved_bytes == 40 * MIB
    assert block_sizes(it) == [
        [(10 * MIB, True), (10 * MIB, False)],
        [(10 * MIB, False), (10 * MIB, True)],
    ]
    refilled = it.malloc(60 * MIB)
    assert (refilled.address, it.reserved_bytes) == (blocks[1].address, 80 * MIB)
    assert block_sizes(it) == [[(10 * MIB, True), (60 * MIB, True), (10 * MIB, True)]]


def test_pages_that_do_not_fit_are_not_mapped_and_free_ones_move():
    it = allocator("expandable_segments:True", capacity_bytes=100 * MIB)
    it.free(it.malloc(60 * MIB, stream=1))
    it.malloc(80 * MIB)
    assert (it.reserved_bytes, it.num_retries) == (80 * MIB, 1)
    with pytest.raises(OutOfMemory):
        it.malloc(40 * MIB)
    assert it.reserved_bytes == 80 * MIB


def test_pages_may_exceed_the_allowance_which_upstream_compares_with_the_request():
    it = allocator("expandable_segments:True", allowed_bytes=30 * MIB)
    it.malloc(22 * MIB)
    assert it.reserved_bytes == 40 * MIB


def test_a_request_beyond_all_reason_has_a_range_of_its_own():
    it = allocator("expandable_segments:True")
    it.malloc(20 * TIB)
    assert it.allocated_bytes == 20 * TIB


# --- trace -----------------------------------------------------------------------------------------------------------


def test_the_trace_has_upstreams_names_and_what_was_asked_for():
    trace = []
    it = allocator(capacity_bytes=24 * MIB, trace=trace)
    block = it.malloc(11 * MIB + 100, stream=3)
    it.free(block)
    it.empty_cache()
    with pytest.raises(OutOfMemory):
        it.malloc(30 * MIB)
    assert [(entry.action, entry.size, entry.stream) for entry in trace] == [
        ("segment_alloc", 12 * MIB, 3),
        ("alloc", 11 * MIB + 100, 3),
        ("free_requested", 11 * MIB + 100, 3),
        ("free_completed", 11 * MIB + 100, 3),
        ("segment_free", 12 * MIB, 3),
        ("oom", 30 * MIB, 0),
    ]
    assert {entry.address for entry in trace[:5]} == {block.address}
    assert trace[5].address == 24 * MIB  # what was still free


def test_the_trace_of_an_expandable_segment_maps_and_unmaps():
    trace = []
    it = allocator("expandable_segments:True", trace=trace)
    block = it.malloc(MIB)
    it.free(block)
    it.empty_cache()
    actions = [entry.action for entry in trace]
    assert actions == ["segment_map", "alloc", "free_requested", "free_completed", "segment_unmap"]
    assert (trace[0].size, trace[-1].size) == (2 * MIB, 2 * MIB)
