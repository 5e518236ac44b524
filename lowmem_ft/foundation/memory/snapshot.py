"""A predicted run as a file for pytorch.org/memory_viz, which shows it like one recorded on a GPU."""

from __future__ import annotations

import functools
import pickle
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.allocator.block import Block
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator, Segment
from lowmem_ft.foundation.memory.allocator.segments import TraceEntry
from lowmem_ft.foundation.memory.category import Category, Phase
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline

# The viewer reads only protocols 2 to 4.
PICKLE_PROTOCOL = 4

Frames = list[dict[str, Any]]


def write_snapshot(path: Path, timeline: Timeline, config: AllocatorConfig | None = None) -> None:
    """Replay a timeline and write what ``torch.cuda.memory._dump_snapshot`` would have written at its end.

    Args:
        path: path of the new file; conventionally ``*.pickle``.
        timeline: the timeline of a run.
        config: the allocator's settings; None: PyTorch's defaults.
    """
    with path.open("wb") as file:
        pickle.dump(memory_snapshot(timeline, config), file, protocol=PICKLE_PROTOCOL)


def memory_snapshot(timeline: Timeline, config: AllocatorConfig | None = None) -> dict[str, Any]:
    """Return what ``torch.cuda.memory._snapshot`` would return at the end of a timeline.

    In place of a stack trace, each allocation has its module with its category and, around it, its phase.

    Args:
        timeline: the timeline of a run.
        config: the allocator's settings; None: PyTorch's defaults.

    Returns:
        The dictionary that the viewer and ``torch.cuda._memory_viz`` read.
    """
    config = config or AllocatorConfig()
    entries: list[TraceEntry] = []
    allocator = CachingAllocator(config, trace=entries)
    live: dict[int, Block] = {}
    trace: list[dict[str, Any]] = []
    for position, (kind, index) in enumerate(timeline.events):
        allocation = None if kind == "empty_cache" else timeline.allocations[index]
        if allocation is None:
            allocator.empty_cache()
        elif allocation.place != "device":
            continue
        elif kind == "malloc":
            live[index] = allocator.malloc(allocation.size_bytes, allocation.stream)
        else:
            allocator.free(live.pop(index))
        trace += (_trace_entry(entry, position, allocation) for entry in entries)
        entries.clear()
    owners = {block.address: timeline.allocations[index] for index, block in live.items()}
    return {
        "segments": [_segment(segment, owners) for segment in allocator.segments()],
        "device_traces": [trace],
        "allocator_settings": _settings(config),
        "external_annotations": [],
    }


def _trace_entry(entry: TraceEntry, position: int, allocation: Allocation | None) -> dict[str, Any]:
    return {
        "action": entry.action,
        "addr": entry.address,
        "size": entry.size,
        "stream": entry.stream,
        "time_us": position,
        "frames": _frames_of(allocation),
        # The viewer colours by category only if one of them is `unknown`: otherwise it fails.
        "category": allocation.category if allocation and entry.action == "alloc" else "unknown",
        "pool_id": (0, 0),
    }


def _segment(segment: Segment, owners: dict[int, Allocation]) -> dict[str, Any]:
    in_use = sum(block.size for block in segment.blocks if block.is_allocated)
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": in_use,
        "active_size": in_use,
        "requested_size": sum(block.requested_bytes for block in segment.blocks),
        "stream": segment.stream,
        "segment_type": "small" if segment.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": segment.is_expandable,
        "frames": [],
        "blocks": [
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.requested_bytes,
                "state": "active_allocated" if block.is_allocated else "inactive",
                "frames": _frames_of(owners[block.address]) if block.is_allocated else [],
            }
            for block in segment.blocks
        ],
    }


def _frames_of(allocation: Allocation | None) -> Frames:
    if allocation is None:
        return []
    return _frames(allocation.module, allocation.category, allocation.phase)


@functools.cache  # shared: the pickle then holds each of them once
def _frames(module: str, category: Category, phase: Phase) -> Frames:
    return [
        {"filename": module or "outside any module", "line": 0, "name": category},
        {"filename": "phase", "line": 0, "name": phase},
    ]


def _settings(config: AllocatorConfig) -> dict[str, Any]:
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1 if config.max_split_size_bytes is None else config.max_split_size_bytes,
        "garbage_collection_threshold": config.garbage_collection_threshold,
        "expandable_segments": config.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {
            str(2**interval): divisions for interval, divisions in enumerate(config.roundup_power2_divisions)
        },
    }
