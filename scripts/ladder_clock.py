"""The memory ladder by virtual GPUs' timing model: tokens per second of each rung that fits, and its bottleneck."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from ladder_rungs import RUNGS, Rung, settings_of

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import StepTime
from lowmem_ft.planning.estimator.estimate import estimate_of_trace
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.techniques.optimizer_in_backward import InBackward
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.replay.trace_estimate import EstimateContext, allocator_config_of_runs, step_time

RESIDENT = next(rung for rung in RUNGS if rung.name == "+ step in backward")
"""The last rung that keeps everything on the GPU; those below it compute the same updates."""

COSTS: dict[str, Callable[[Work], bool]] = {
    "matrix products": lambda work: work.kind == "kernel" and work.flops > 0,
    "other kernels": lambda work: work.kind == "kernel" and not work.flops,
    "copies": lambda work: work.kind == "copy",
}
"""Kinds of work that a step is timed without, one at a time: the seconds saved are what they cost. Copies hidden behind
kernels cost nothing, and two kinds that hide each other cost less separately than both together."""


def on_clock(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each rung that fits a GPU; the resident one is timed on every GPU, as if memory sufficed."""
    settings = (
        f"model={arguments.model or 'llama-3.1-8b'}",
        "data=any",
        f"data.max_length={arguments.tokens}",
        f"training.gradient_accumulation_steps={arguments.accumulation}",
    )
    for name in arguments.gpus:
        gpu = find_gpu(name)
        resident = _row(RESIDENT, gpu, settings)
        for rung in RUNGS:
            print(f"{gpu.name}: {rung.name}", file=sys.stderr)
            row = resident if rung is RESIDENT else _row(rung, gpu, settings)
            if row["fits"] or rung is RESIDENT:
                yield row | {
                    "of_resident": resident["step_seconds"] / row["step_seconds"],
                    "of_resident_without_overlap": (
                        resident["step_seconds"] / row["step_seconds_without_overlap"]
                    ),
                }


def lines_of(rows: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Yield the cells of a table of :func:`on_clock`, its headings first."""
    measured = ["tokens/s", "of resident", "without overlap"]
    yield ["GPU", "rung", *measured, "bound by", *(f"for {kind}" for kind in COSTS)]
    for row in rows:
        beyond = "" if row["fits"] else " (memory assumed)"
        yield [
            row["gpu"] + beyond,
            row["rung"],
            f"{row['tokens_per_second']:,.0f}",
            f"{row['of_resident']:.2f}",
            f"{row['of_resident_without_overlap']:.2f}",
            row["bound_by"],
            *(f"{share:.1%}" for share in row["cost_shares"].values()),
        ]


def _row(rung: Rung, gpu: Gpu, settings: Sequence[str]) -> dict[str, Any]:
    recipe = load_recipe(None, [*settings, *settings_of(rung)])
    traced = trace_recipe(recipe, lambda: VirtualGPU(gpu))
    estimate = estimate_of_trace(recipe, traced, gpu, recipe.budget, 0.0, "")
    assert estimate.step is not None, "two steps are traced"

    def seconds_without(is_free: Callable[[Work], bool]) -> float:
        return _step(recipe, _without(traced.trace, is_free), gpu).seconds

    seconds = estimate.step.seconds
    return {
        "gpu": gpu.name,
        "rung": rung.name,
        "fits": estimate.fits,
        "allocated_peak_bytes": estimate.allocated_peak_bytes,
        "host_peak_bytes": estimate.host_peak_bytes,
        "step_seconds": seconds,
        "tokens_per_second": estimate.step.tokens_per_second,
        "step_seconds_without_overlap": _seconds_without_overlap(recipe, gpu) or seconds,
        "bound_by": estimate.step.bound_by,
        "cost_shares": {kind: 1 - seconds_without(is_free) / seconds for kind, is_free in COSTS.items()},
    }


def _seconds_without_overlap(recipe: Recipe, gpu: Gpu) -> float | None:
    """Return seconds with every update in the compute stream; None if no update leaves it anyway."""
    asked: list[bool] = []

    def overlaps(updates: InBackward) -> bool:
        asked.append(True)
        return False

    with mock.patch.object(InBackward, "overlaps", property(overlaps)):
        traced = trace_recipe(recipe, lambda: VirtualGPU(gpu))
    return _step(recipe, traced.trace, gpu).seconds if asked else None


def _step(recipe: Recipe, trace: Trace, gpu: Gpu) -> StepTime:
    is_vertical = recipe.accumulation.order == "vertical"  # then a trace has all of a step's micro-batches
    context = EstimateContext(
        micro_batches_per_step=None if is_vertical else recipe.training.gradient_accumulation_steps
    )
    step = step_time(Replays(trace, allocator_config_of_runs(gpu)), gpu, context)
    assert step is not None, "two steps are traced"
    return step


def _without(trace: Trace, is_free: Callable[[Work], bool]) -> Trace:
    """Return the same trace with some work done in no time; its launches stay."""
    work = [
        dataclasses.replace(entry, num_bytes=0, flops=0) if is_free(entry) else entry for entry in trace.work
    ]
    return dataclasses.replace(trace, work=work)
