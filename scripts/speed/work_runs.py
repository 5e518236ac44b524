"""Runs of a work's peer and of ours: by the clock of a virtual GPU, or on this machine's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from measured_on import wait_for_the_gpu
from measuring.measured_rows import Documents, name_of
from measuring.real_run import run_for_real
from speed.peer_settings import ROWS, Setting, setting_of
from speed.peers import MicroBatches
from speed.this_gpu import Result, ThisGPU
from speed.works import WORKS, Work

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.planning.estimator.estimate import estimate_of_trace
from lowmem_ft.planning.estimator.traces.tracing import trace_recipe
from lowmem_ft.planning.estimator.worst_batch import documents_of_full_row
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.calls.work import STEP_END
from lowmem_ft.virtual_gpu.calls.work import Work as LoggedWork
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

MEASURED_STEPS = 4
"""Steps of a run on a GPU; the first does not count."""


def by_clock(name: str, setting: str, documents: Documents) -> Result:
    """Run a peer's setting, such as ``2:off``, on a virtual GPU."""
    return of_peer(WORKS[name], setting_of(setting), documents)


def measured(name: str, run: str, documents: Documents) -> Result:
    """Run a peer's setting, or ours, on this machine's GPU."""
    gpu, work = ThisGPU(), WORKS[name]
    wait_for_the_gpu()
    seconds = run_on(gpu, work, run, documents, num_steps=MEASURED_STEPS)
    return gpu.result() if seconds is None else gpu.result_of(seconds[1:])


def run_on(
    gpu: ThisGPU,
    work: Work,
    run: str,
    documents: Documents,
    *,
    num_steps: int,
    after_step: Callable[[], object] = lambda: None,
) -> list[float] | None:
    """Run steps of ours, or of a peer's setting, on the same rows.

    Args:
        gpu: where the peer runs; ours finds its device itself.
        work: the work.
        run: ``ours:0`` and the like, or a setting such as ``2:off``.
        documents: tokens of each document of a row.
        num_steps: number of steps.
        after_step: called at the end of each step of ours; the peer calls ``gpu.end_step``.

    Returns:
        Seconds of each step of ours; None for the peer, whose seconds ``gpu`` has.
    """
    if run in work.ours():
        settings = (*work.ours()[run].settings(documents), "model.weights=random", "data=any")
        recipe = load_recipe(work.recipe, settings)
        return run_for_real(recipe, num_steps=num_steps, documents=documents, after_step=after_step).seconds
    setting = setting_of(run)
    step = MicroBatches(setting=setting, number=ROWS // setting.rows, documents=documents, steps=num_steps)
    work.peer.run(gpu, step)
    return None


def of_peer(work: Work, setting: Setting, documents: Documents) -> Result:
    """Run a peer's program in this process, with one micro-batch a step and with two."""
    one = _steps_of_peer(work, MicroBatches(setting=setting, number=1, documents=documents))
    further = ROWS // setting.rows - 1
    if not further:
        return one
    if work.peer.updates_each:
        two = dataclasses.replace(one, seconds=2 * one.seconds, outside_products=2 * one.outside_products)
    else:
        two = _steps_of_peer(work, MicroBatches(setting=setting, number=2, documents=documents))
    return dataclasses.replace(
        two,
        seconds=one.seconds + further * (two.seconds - one.seconds),
        outside_products=one.outside_products + further * (two.outside_products - one.outside_products),
    )


def _steps_of_peer(work: Work, step: MicroBatches) -> Result:
    with VirtualGPU(work.gpu) as gpu:
        work.peer.run(gpu, step)
    return _result(gpu.report(), gpu.trace().work, find_gpu(work.gpu))


def ours(work: Work, documents: Documents) -> Result:
    """Estimate our recipe.

    Raises:
        UserError: if an estimate assumes other documents in a packed row.
    """
    gpu, recipe = find_gpu(work.gpu), load_recipe(work.recipe, work.settings(documents))
    assumed = documents_of_full_row(recipe, load_model_config(recipe.model, architecture_only=True))
    if assumed != documents:
        raise UserError(
            f"The clock's rows of {work.recipe} are {name_of(assumed)}, not {name_of(documents)}: compare on those, or "
            "measure."
        )
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
