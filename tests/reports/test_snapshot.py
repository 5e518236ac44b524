from __future__ import annotations

import pickle
import pickletools

import pytest
from torch.cuda import _memory_viz as viz

from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.allocator.replay import replay
from lowmem_ft.foundation.memory.snapshot import memory_snapshot, write_snapshot
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.units import MIB

CONFIGS = [AllocatorConfig(), AllocatorConfig(expandable_segments=True)]

# What unpickle() of torch/utils/viz/MemoryViz.js knows.
VIEWER_OPCODES = """
    PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT
    SHORT_BINUNICODE BINUNICODE EMPTY_DICT SETITEM SETITEMS EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE1 TUPLE2 TUPLE3
"""


@pytest.fixture(params=CONFIGS, ids=["fixed", "expandable"])
def config(request) -> AllocatorConfig:
    return request.param


def totals_over_time(snapshot: dict, plus: set[str], minus: set[str]) -> list[int]:
    """The viewer's curve: what some actions add and others take away."""
    total, totals = 0, [0]
    for entry in snapshot["device_traces"][0]:
        total += entry["size"] * ((entry["action"] in plus) - (entry["action"] in minus))
        totals.append(total)
    return totals


def test_the_curve_of_allocated_memory_is_the_timelines(timeline, config):
    totals = totals_over_time(memory_snapshot(timeline, config), {"alloc"}, {"free_completed"})
    live_bytes = list(timeline.live_bytes())
    assert max(totals) == max(live_bytes)
    assert totals[-1] == live_bytes[-1]


def test_the_curve_of_segments_is_the_replays_reserved_memory(timeline, config):
    snapshot = memory_snapshot(timeline, config)
    totals = totals_over_time(snapshot, {"segment_alloc", "segment_map"}, {"segment_free", "segment_unmap"})
    counted = replay(timeline, CachingAllocator(config))
    assert max(totals) == counted.peak_reserved_bytes
    assert totals[-1] == counted.reserved_bytes[-1] == sum(seg["total_size"] for seg in snapshot["segments"])


def test_segments_are_the_blocks_in_them(timeline, config):
    snapshot = memory_snapshot(timeline, config)
    assert snapshot["segments"]
    in_use = 0
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == address
            address += block["size"]
            in_use += block["size"] * (block["state"] == "active_allocated")
        assert address == segment["address"] + segment["total_size"]
    assert in_use == sum(segment["allocated_size"] for segment in snapshot["segments"]) == 600 * MIB


def test_torchs_own_functions_read_the_file(timeline, config, tmp_path):
    write_snapshot(tmp_path / "run.pickle", timeline, config)
    snapshot = pickle.loads((tmp_path / "run.pickle").read_bytes())
    summary = viz.segsum(snapshot)
    assert "total_allocated: 600.0MiB" in summary
    assert "cudaMalloc" in viz.trace(snapshot) or config.expandable_segments
    assert "snapshot.pickle" in viz.trace_plot(snapshot)
    assert "snapshot.pickle" in viz.segment_plot(snapshot)
    lines = viz.memory(snapshot, format_flamegraph=lambda text: text).splitlines()
    layer = "stream_0;active_allocated;phase:0:load;model.layers.0.mlp:0:parameter"
    assert f"{layer} {100 * MIB}" in lines


def test_the_web_page_can_unpickle_the_file(timeline, tmp_path):
    timeline.malloc(Allocation(size_bytes=1, module="m" * 300))
    write_snapshot(tmp_path / "run.pickle", timeline)
    used = list(pickletools.genops((tmp_path / "run.pickle").read_bytes()))
    assert {opcode.name for opcode, _, _ in used} <= set(VIEWER_OPCODES.split())
    protocol = next(argument for opcode, argument, _ in used if opcode.name == "PROTO")
    assert protocol in (2, 3, 4)


def test_allocations_have_a_category_and_the_one_that_the_web_page_insists_on_is_there(timeline):
    entries = memory_snapshot(timeline)["device_traces"][0]
    categories = {entry["category"] for entry in entries if entry["action"] == "alloc"}
    assert categories == {
        "parameter", "activation", "logits_and_loss", "temporary", "gradient", "optimizer_state"
    }  # fmt: skip
    assert "unknown" in {entry["category"] for entry in entries}


def test_a_free_names_what_was_freed(timeline):
    entries = memory_snapshot(timeline)["device_traces"][0]
    born = {}
    for entry in entries:
        if entry["action"] == "alloc":
            born[entry["addr"]] = entry
        elif entry["action"] == "free_completed":
            assert entry["frames"] == born[entry["addr"]]["frames"]
    assert [entry["time_us"] for entry in entries] == sorted(entry["time_us"] for entry in entries)


def test_streams_keep_their_own_segments():
    timeline = Timeline()
    for stream in (0, 7):
        timeline.malloc(Allocation(size_bytes=MIB, stream=stream))
    snapshot = memory_snapshot(timeline)
    assert sorted(segment["stream"] for segment in snapshot["segments"]) == [0, 7]
    assert {entry["stream"] for entry in snapshot["device_traces"][0]} == {0, 7}
