from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from rich.console import Console, RenderableType

from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.allocator.replay import replay
from lowmem_ft.foundation.memory.memory_estimate import (
    BudgetVerdict,
    DeviceLimit,
    MemoryEstimate,
    ModelSize,
    StepTime,
)
from lowmem_ft.foundation.memory.playback import Playback, StepClock
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.units import GIB, MIB


@pytest.fixture
def as_text():
    """What a console without colour and without a terminal prints."""

    def render(renderable: RenderableType, width: int = 80) -> str:
        console = Console(width=width, no_color=True, force_terminal=False)
        with console.capture() as capture:
            console.print(renderable)
        return capture.get()

    return render


@pytest.fixture
def timeline() -> Timeline:
    """Two layers and two steps: sizes that the allocator rounds, and a peak of temporaries in the second backward."""
    run = Timeline()

    def allocate(size_bytes: int, category: Any, phase: Any, module: str) -> int:
        return run.malloc(Allocation(size_bytes=size_bytes, category=category, phase=phase, module=module))

    layers = ["model.layers.0.mlp", "model.layers.1.mlp"]
    for layer in layers:
        allocate(100 * MIB, "parameter", "load", layer)
    for step in range(2):
        kept = [allocate(30 * MIB + 100, "activation", "forward", layer) for layer in layers]
        logits = allocate(50 * MIB, "logits_and_loss", "forward", "lm_head")
        scratch = allocate(64 * MIB, "temporary", "backward", layers[1])
        run.free(logits)
        gradients = [allocate(100 * MIB, "gradient", "backward", layer) for layer in layers]
        for allocation in (*kept, scratch):
            run.free(allocation)
        if step == 0:
            for layer in layers:
                allocate(200 * MIB, "optimizer_state", "optimizer_step", layer)
        for gradient in gradients:
            run.free(gradient)
    run.empty_cache()
    run.malloc(Allocation(size_bytes=3 * GIB, category="parameter", phase="save", place="host"))
    return run


@pytest.fixture
def estimate(timeline: Timeline) -> MemoryEstimate:
    peak_bytes = replay(timeline, CachingAllocator()).peak_allocated_bytes
    return MemoryEstimate(
        model=ModelSize(name="two-layers", parameters=52_428_800, trainable_parameters=52_428_800),
        gpu=DeviceLimit(name="small-gpu", memory_bytes=2 * GIB),
        allocated_peak_bytes=peak_bytes,
        reserved_peak_bytes=peak_bytes + 200 * MIB,
        process_peak_bytes=peak_bytes + 500 * MIB,
        host_peak_bytes=3 * GIB,
        host_pinned_bytes=0,
        by_category_at_peak={
            "parameter": 200 * MIB,
            "optimizer_state": 400 * MIB,
            "gradient": 200 * MIB,
            "activation": 0,
            "temporary": peak_bytes - 800 * MIB,
        },
        by_phase={"load": 200 * MIB, "forward": 700 * MIB, "backward": peak_bytes},
        peak_phase="backward",
        peak_module="model.layers.1.mlp",
        step=StepTime(seconds=0.5, tokens=1000, bound_by="memory bandwidth"),
        budget=BudgetVerdict(device_bytes=2 * GIB, host_bytes=None),
        fits=True,
        choices=("attention: math kernel (the mask is not causal)",),
        not_modelled=("memory that other processes hold",),
        versions={"torch": "2.13.0"},
        trace_seconds=3.14,
        timeline=timeline,
    )


@pytest.fixture
def too_big(estimate: MemoryEstimate) -> MemoryEstimate:
    return dataclasses.replace(
        estimate,
        gpu=DeviceLimit(name="tiny-gpu", memory_bytes=GIB),
        budget=BudgetVerdict(device_bytes=GIB, host_bytes=None),
        fits=False,
    )


@pytest.fixture
def played(estimate: MemoryEstimate) -> MemoryEstimate:
    """The estimate of two layers as a GPU plays it: the second step takes three seconds, the same for each event."""
    timeline = estimate.timeline
    counted = replay(timeline, CachingAllocator())
    first = max(
        position
        for position, (kind, index) in enumerate(timeline.events)
        if kind == "malloc" and timeline.allocations[index].category == "activation"
    ) - 1  # fmt: skip
    last = len(timeline.events) - 2  # then come the empty cache and the file
    positions = np.arange(first, last + 1)
    clock = StepClock(
        positions=positions,
        seconds=np.linspace(0.0, 3.0, len(positions)),
        step_seconds=3.0,
        micro_batches=((first, last),),
    )
    return dataclasses.replace(
        estimate,
        reserved_peak_bytes=counted.peak_reserved_bytes,
        process_peak_bytes=counted.peak_reserved_bytes + 300 * MIB,
        playback=Playback(block_bytes=counted.block_bytes, reserved_bytes=counted.reserved_bytes, step=clock),
    )
