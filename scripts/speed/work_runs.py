"""Runs of a work's peer and of ours: by the clock of a virtual GPU, or on this machine's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ground_truth.real_run import run_for_real
from measured_on import wait_for_the_gpu
from speed.peers import ROWS, MicroBatches
from speed.this_gpu import Result, ThisGPU
from speed.works import WORKS, Work, setting_of

from lowmem_ft.catalog.gpu_catalog import find_gpu
from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.estimator.estimate import estimate_of_trace
from lowmem_ft.estimator.traces.tracing import trace_recipe
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.recording.work import STEP_END
from lowmem_ft.virtual_gpu.recording.work import Work as LoggedWork
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

MEASURED_STEPS = 4
"""Steps of a run on a GPU; the first does not count."""


def by_clock(name: str, setting: str) -> Result:
    """Run a peer's setting, such as ``2:off``, on a virtual GPU."""
    return of_peer(WORKS[name], *setting_of(setting))


def measured(name: str, setting: str) -> Result:
    """Run a peer's setting, or ours, on this machine's GPU."""
    gpu, work = ThisGPU(), WORKS[name]
    if setting in work.ours():
        overrides = (*work.ours()[setting].overrides, "model.weights=random", "data=any")
        recipe = load_recipe(work.recipe, overrides)
        wait_for_the_gpu()
        return gpu.result_of(run_for_real(recipe, num_steps=MEASURED_STEPS).seconds[1:])
    rows, checkpoints = setting_of(setting)
    wait_for_the_gpu()
    step = MicroBatches(rows=rows, number=ROWS // rows, checkpoints=checkpoints, steps=MEASURED_STEPS)
    work.peer.run(gpu, work.peer.model, step)
    return gpu.result()


def of_peer(work: Work, rows: int, checkpoints: bool) -> Result:
    """Run a peer's program in this process, with one micro-batch a step and with two."""
    one = _steps_of_peer(work, MicroBatches(rows=rows, number=1, checkpoints=checkpoints))
    further = ROWS // rows - 1
    if not further:
        return one
    if work.peer.updates_each:
        two = dataclasses.replace(one, seconds=2 * one.seconds, outside_products=2 * one.outside_products)
    else:
        two = _steps_of_peer(work, MicroBatches(rows=rows, number=2, checkpoints=checkpoints))
    return dataclasses.replace(
        two,
        seconds=one.seconds + further * (two.seconds - one.seconds),
        outside_products=one.outside_products + further * (two.outside_products - one.outside_products),
    )


def _steps_of_peer(work: Work, step: MicroBatches) -> Result:
    with VirtualGPU(work.gpu) as gpu:
        work.peer.run(gpu, work.peer.model, step)
    return _result(gpu.report(), gpu.trace().work, find_gpu(work.gpu))


def ours(work: Work) -> Result:
    """Estimate our recipe."""
    gpu, recipe = find_gpu(work.gpu), load_recipe(work.recipe, work.overrides)
    traced = trace_recipe(recipe, functools.partial(VirtualGPU, gpu))
    return _result(estimate_of_trace(recipe, traced, gpu, recipe.budget, 0.0, ""), traced.trace.work, gpu)


def _result(estimate: MemoryEstimate, log: Sequence[LoggedWork], gpu: Gpu) -> Result:
    """Read a step; where an estimate counts micro-batches that it has not traced, by the traced ones' share."""
    ends = [index for index, entry in enumerate(log) if entry.kind == "mark" and entry.name == STEP_END]
    span = Clock(log).times_on(gpu).between(*ends[-2:])
    seconds = span.seconds if estimate.step is None else estimate.step.seconds
    return Result(
        seconds=seconds,
        outside_products=seconds * (1 - span.shares["compute"]),
        process_bytes=estimate.process_peak_bytes,
        fits=estimate.fits,
    )
