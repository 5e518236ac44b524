"""Seconds by kind of kernel that the clock predicts for the runs of ``profiles-cuda.json``."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence

from measuring.public_seconds import updated_in_chunks_until
from speed.peer_settings import ROWS, setting_of
from speed.peers import MicroBatches
from speed.works import WORKS

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.calls.work import STEP_END, Work
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

GPU, WORK, PEER, OURS, DATE = "h200", "8b-full", "2:off", ("ours:0", "ours:3"), "2026-11-27"
"""The runs that were profiled, in their order; the peer's row was one document, ours had four."""

_KINDS = {
    "products": "products",
    **dict.fromkeys(("attention", "attention backward"), "attention"),
    **dict.fromkeys(("fused kernels", "fused backward kernels", "cross entropy"), "Liger"),
    "updates": "update",
}
"""The profiler's name for a kind; the rest are others."""


def predicted_profiles() -> list[dict[str, float]]:
    """Return the seconds of each run by the profiler's kinds."""
    found = [_of_peer(), *map(_of_ours, OURS)]
    names = [*dict.fromkeys(_KINDS.values()), "others"]
    return [{name: round(seconds.get(name, 0.0), 4) for name in names} for seconds in found]


def _of_peer() -> Mapping[str, float]:
    """Return a step's seconds from one with a micro-batch and one with two."""
    setting, steps = setting_of(PEER), []
    for number in (1, 2):
        with VirtualGPU(GPU) as gpu:
            WORKS[WORK].peer.run(gpu, MicroBatches(setting=setting, number=number, documents=(2048,)))
        log = gpu.trace().work
        steps.append(_seconds(log, [(1, _last_step(log))]))
    one, two = steps
    further = ROWS // setting.rows - 1
    return {kind: one[kind] + further * (two[kind] - one[kind]) for kind in two}


def _of_ours(name: str) -> Mapping[str, float]:
    work = WORKS[WORK]
    recipe = load_recipe(work.recipe, work.ours()[name].settings((512,) * 4))
    with updated_in_chunks_until(DATE):
        trace = trace_recipe(recipe, functools.partial(VirtualGPU, find_gpu(GPU))).trace
    first, last = _last_step(trace.work)
    traced = [bounds for bounds in trace.micro_batches if first <= bounds[0] < last]
    others = recipe.training.gradient_accumulation_steps - len(traced)
    return _seconds(trace.work, [(1, (first, last)), *([(others, traced[-1])] if traced else [])])


def _last_step(log: Sequence[Work]) -> tuple[int, int]:
    ends = [index for index, entry in enumerate(log) if entry.kind == "mark" and entry.name == STEP_END]
    return ends[-2], ends[-1]


def _seconds(log: Sequence[Work], stretches: Sequence[tuple[int, tuple[int, int]]]) -> Mapping[str, float]:
    clock, seconds = Clock(log), defaultdict[str, float](float)
    times = clock.times_on(find_gpu(GPU))
    for often, bounds in stretches:
        for kind, spent in clock.seconds_by_kind(times, *bounds).items():
            seconds[_KINDS.get(kind, "others")] += often * spent
    return seconds
