"""A recipe's own steps, for real: the most memory that each phase of a run holds, and each step's seconds.

The pieces are those of a training run, with batches as large as the worst one that the estimator uses, of random tokens
(``measured_rows.py``). A meter is called only at the beginning of each phase, and reads the peak of the phase before.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measuring.measured_rows import Documents, MeasuredRows, name_of
from torch import nn

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.foundation.memory.category import Phase
from lowmem_ft.foundation.system.device_memory import ProcessBytes
from lowmem_ft.foundation.system.host_memory import read_host_memory
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.planning.estimator.worst_batch import documents_of_full_row, full_row_collator
from lowmem_ft.recipe import Recipe
from lowmem_ft.techniques.modules.patching import call_around
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import Plan, build_session, plan_session
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.session import Session
from lowmem_ft.training.step.step import evaluation_loss, train_step

PeakByPhase = dict[Phase, int]


@dataclass(kw_only=True)
class RealPeaks:
    """Peaks of a run, in bytes, and its seconds.

    Args:
        allocated: bytes of tensors, by phase.
        reserved: bytes of the caching allocator's segments, by phase; empty without one.
        process: bytes of the whole process: on CUDA its device memory, on a CPU its host memory.
        process_read_by: source of that number.
        seconds: of each optimizer step, from one moment without work on the device to the next.
        rows: what the rows were (:meth:`~measuring.measured_rows.MeasuredRows.described`).
    """

    allocated: PeakByPhase = field(default_factory=dict)
    reserved: PeakByPhase = field(default_factory=dict)
    process: int = 0
    process_read_by: str = ""
    seconds: list[float] = field(default_factory=list)
    rows: dict[str, Any] = field(default_factory=dict)


class PhaseMeter:
    """Reads the peaks of one phase after the other: every storage of a CPU, or the counters of CUDA's allocator.

    Those change when the host requests memory: no need to wait for kernels. The process's memory outside torch's
    allocator does not shrink while it lives, and cached segments are freed only when memory runs out: reading at the
    end of each phase finds the peak, as long as no allocation had to be retried.

    Args:
        device: the device of the run.
        tracker: a running tracker of a CPU's storages; None on CUDA.
    """

    def __init__(self, device: torch.device, tracker: StorageTracker | None = None) -> None:
        self.peaks = RealPeaks()
        self._device, self._tracker = device, tracker
        self._process = ProcessBytes(device) if tracker is None else None
        self._phase: Phase | None = None

    def begin(self, phase: Phase) -> None:
        """End the current phase, and start the next from what is alive now."""
        self.end()
        if self._tracker is None:
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._tracker.reset_peak()
        self._phase = phase

    def end(self) -> None:
        """End the current phase."""
        peaks, phase, self._phase = self.peaks, self._phase, None
        if self._tracker is not None:
            peaks.process = read_host_memory().peak_bytes
            peaks.process_read_by = "resident, without pages of files"
            if phase is not None:
                _raise_to(peaks.allocated, phase, self._tracker.peak_bytes)
        elif phase is not None and self._process is not None:
            _raise_to(peaks.allocated, phase, torch.cuda.max_memory_allocated(self._device))
            _raise_to(peaks.reserved, phase, torch.cuda.max_memory_reserved(self._device))
            used, peaks.process_read_by = self._process.read()
            peaks.process = max(peaks.process, used)


def _tell_phases(runtime: Runtime, meter: PhaseMeter) -> None:
    """Let a meter know where the phases of each step begin."""

    @contextlib.contextmanager
    def micro_batch(own: Callable[..., Any], model: nn.Module, *, is_last: bool) -> Iterator[None]:
        meter.begin("forward")  # backward reports its own beginning
        with own(model, is_last=is_last):
            yield

    def backward(own: Callable[..., Any], loss: torch.Tensor) -> None:
        meter.begin("backward")
        own(loss)
        meter.begin("optimizer_step")  # until there is another micro-batch

    call_around(runtime.ranks, "micro_batch", micro_batch)
    call_around(runtime.machine, "backward", backward)


def run_for_real(
    recipe: Recipe,
    *,
    num_steps: int = 2,
    documents: Documents | None = None,
    tracker: StorageTracker | None = None,
    after_step: Callable[[], object] = lambda: None,
) -> RealPeaks:
    """Load, take optimizer steps and, if the recipe has held-out data, evaluate.

    Args:
        recipe: the recipe to run; its data is not read.
        num_steps: number of optimizer steps; from the second on all optimizer state exists.
        documents: tokens of each document of a row; None: those of the rows that an estimate assumes.
        tracker: counts the tensors of a CPU; None: a plain one.
        after_step: called at the end of each step.

    Returns:
        The peaks of each phase over all steps.

    Raises:
        UserError: if this machine cannot run the recipe.
        ValueError: if rows of several documents shall run without packing, or have another length than the recipe's.
    """
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        runtime = launched_runtime(recipe.training, Path(scratch))
        device = runtime.machine.device
        on_gpu = device.type == "cuda"
        meter = PhaseMeter(device, None if on_gpu else stack.enter_context(tracker or StorageTracker()))
        _tell_phases(runtime, meter)
        _run(recipe, runtime, meter, num_steps, documents, after_step)
        return meter.peaks


def _run(
    recipe: Recipe,
    runtime: Runtime,
    meter: PhaseMeter,
    num_steps: int,
    documents: Documents | None,
    after_step: Callable[[], object],
) -> None:
    training = recipe.training
    plan = plan_session(recipe, runtime, load_model_config(recipe.model, architecture_only=True))
    batches = _Batches(recipe, plan, documents)
    meter.peaks.rows = batches.rows.described()
    meter.begin("load")
    session = build_session(recipe, runtime, plan, num_training_steps=num_steps)
    for _ in range(num_steps):
        window = [
            batches.take(training.per_device_train_batch_size)
            for _ in range(training.gradient_accumulation_steps)
        ]
        begin = _when_idle(runtime.machine.device)
        train_step(session, window)
        meter.peaks.seconds.append(_when_idle(runtime.machine.device) - begin)
        after_step()
        del window
    if has_held_out_data(recipe):
        _evaluate(recipe, batches, session, meter)
    meter.end()


def _when_idle(device: torch.device) -> float:
    """Wait for a GPU's work; return the time in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _evaluate(recipe: Recipe, batches: _Batches, session: Session, meter: PhaseMeter) -> None:
    training = recipe.training
    num_rows = training.per_device_eval_batch_size or training.per_device_train_batch_size
    session.model.eval()
    meter.begin("evaluation")
    evaluation_loss(session, [batches.take(num_rows)])


def has_held_out_data(recipe: Recipe) -> bool:
    """Return whether a run of the recipe would evaluate."""
    data = recipe.data
    return not (data.eval_path is None and data.eval_split is None and data.eval_size is None)


class _Batches:
    """Hands out micro-batches of measured rows, one after the other."""

    def __init__(self, recipe: Recipe, plan: Plan, documents: Documents | None) -> None:
        full = documents_of_full_row(recipe, plan.hf_config)
        documents = documents or full
        if sum(documents) != sum(full) or (len(documents) > 1 and not recipe.data.packing):
            raise ValueError(
                f"The recipe has no rows of {name_of(documents)} tokens: its own have {sum(full)} tokens, "
                f"with data.packing={str(recipe.data.packing).lower()}."
            )
        self.rows = MeasuredRows.of(plan.hf_config, documents)
        self._collate = full_row_collator(
            recipe, plan.hf_config, attn_implementation=plan.attention.implementation
        )
        self._taken = 0

    def take(self, num_rows: int) -> Batch:
        """Return the next rows."""
        first, self._taken = self._taken, self._taken + num_rows
        return self._collate(self.rows.rows(first, num_rows))


def _raise_to(peaks: PeakByPhase, phase: Phase, num_bytes: int) -> None:
    peaks[phase] = max(peaks.get(phase, 0), num_bytes)
