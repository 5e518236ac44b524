"""Runtime of a rehearsal: a virtual GPU in place of the device; one traced step represents all steps of its shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.foundation.system.process_size import HOST_BYTES_WITH_CUDA
from lowmem_ft.foundation.tensors.live_tensors import storage_key
from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.models.saving import save_tokenizer
from lowmem_ft.optimizers import export_optimizer_state
from lowmem_ft.planning.estimator.runtime import NoValues, VirtualMachine, VirtualRanks
from lowmem_ft.planning.estimator.traced_answers import trace_answer
from lowmem_ft.planning.estimator.traces.tracing import NUM_MICRO_BATCHES
from lowmem_ft.planning.rehearsal.records import Records, Saved
from lowmem_ft.planning.rehearsal.window_shapes import (
    MOST_EVALUATION_SHAPES,
    MOST_SHAPES,
    Shapes,
    WindowShape,
    in_shape,
    tensors_of,
)
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.budget_cap import Host
from lowmem_ft.training.step.machine import Machine
from lowmem_ft.training.step.schedule import create_scheduler
from lowmem_ft.training.step.session import Session
from lowmem_ft.training.step.step import StepResult
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.host_peak import ON_HOST


class _RehearsedValues(NoValues):
    """One traced step in place of all steps of its shape, and likewise evaluations and answers.

    Args:
        gpu: the virtual GPU, inside whose block everything runs.
        machine: the same, as the loop sees it.
        ranks: the only process.
        recipe: the run's.
        records: notes what is traced and counted.
        on_step: called with the number of each step, and the number of shapes traced.
    """

    def __init__(
        self,
        gpu: VirtualGPU,
        machine: Machine,
        ranks: Ranks,
        recipe: Recipe,
        records: Records,
        on_step: Callable[[int, int], None],
    ) -> None:
        super().__init__(gpu, machine, ranks)
        self._gpu, self._recipe, self._records, self._on_step = gpu, recipe, records, on_step
        self._longest_answer = 0
        self._takes_window = key_with(recipe, "whole window at once") is not None
        self._shapes, self._evaluation_shapes = Shapes(MOST_SHAPES), Shapes(MOST_EVALUATION_SHAPES)

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the run's own scheduler: learning rates are numbers on the host."""
        self._scheduler = create_scheduler(optimizer, config, num_training_steps)
        return self._scheduler

    def take_step(self, window: Sequence[Batch], step: Callable[[Sequence[Batch]], StepResult]) -> StepResult:
        """Trace a step for each new shape; count the others."""
        records = self._records
        records.settle_last()
        records.num_steps += 1
        result, units = None, []
        for unit in [window] if self._takes_window else [[batch] for batch in window]:
            counted, is_new = self._shapes.class_of(WindowShape.of(unit))
            if is_new:
                records.settle_last()
                result = None  # the result so far is of another shape in the same window
                result = self._trace_step(unit, counted.shape, step)
            units.append(counted)
            records.padded_tokens += counted.tokens
            records.rounded_tokens += counted.shape.tokens
        records.windows[tuple(units)] += 1
        num_tokens = sum(batch.num_tokens for batch in window)
        records.num_tokens += num_tokens
        records.num_label_tokens += sum(batch.num_label_tokens for batch in window)
        self._on_step(records.num_steps, len(records.steps))
        if result is None:
            self._scheduler.step()
            return StepResult(loss=0.0, grad_norm=0.0, num_tokens=num_tokens, applied=True, overflow=False)
        return dataclasses.replace(result, num_tokens=num_tokens)

    def _trace_step(
        self, unit: Sequence[Batch], shape: WindowShape, step: Callable[[Sequence[Batch]], StepResult]
    ) -> StepResult:
        window = in_shape(unit, shape)
        for tensor in tensors_of(window):
            self._gpu.mark(tensor, "input")
        if not self._takes_window:
            window *= min(NUM_MICRO_BATCHES, self._recipe.training.gradient_accumulation_steps)
        if not self._records.steps:  # the first step allocates what all others find
            before = self._scheduler.state_dict()
            step(window)
            self._scheduler.load_state_dict(before)
            self._gpu.step_is_over()
            self._records.waits.take()
        begin = self._records.here()
        result = step(window)
        self._records.note(self._records.steps, shape, begin, unit)
        return result

    def to_evaluate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield one batch of each shape; count the others."""
        records = self._records
        records.settle_last()
        records.num_evaluations += 1
        for batch in batches:
            counted, is_new = self._evaluation_shapes.class_of(WindowShape.of([batch]))
            records.evaluated[counted] += 1
            if not is_new:
                continue
            records.settle_last()
            rows = in_shape([batch], counted.shape)[0]
            for tensor in tensors_of([rows]):
                self._gpu.mark(tensor, "input")
            begin = records.here()
            with self._gpu.during("evaluation"):
                yield rows
            records.note(records.evaluations, counted.shape, begin, [batch], is_step=False)
        records.settle_last()

    def generate(
        self, session: Session, input_ids: Sequence[int], max_new_tokens: int, end_ids: Sequence[int]
    ) -> list[int] | None:
        """Trace the answer to a prompt longer than all before it; every answer counts as the longest."""
        self._records.settle_last()
        self._records.answers[self._records.num_steps] += 1
        length = len(input_ids) + max_new_tokens
        if length > self._longest_answer:
            self._longest_answer = length
            with self._gpu.during("evaluation"):
                self._records.answer = trace_answer(session, length, self._gpu)
            self._records.waits.take()
        return None

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Load nothing: no random value is seen."""


class _CountedFiles(RunFiles):
    """Files of which the bytes are counted, and only the tokenizer's are written.

    Args:
        ranks: the only process.
        gpu: the virtual GPU, which holds the weights.
        recipe: the run's.
        records: notes the sizes.
    """

    def __init__(self, ranks: Ranks, gpu: VirtualGPU, recipe: Recipe, records: Records) -> None:
        # An invisible terminal for the run's progress: the rehearsal shows a line of its own.
        super().__init__(ranks, Console(quiet=True, force_terminal=True, width=80, legacy_windows=False))
        self._gpu, self._recipe, self._records = gpu, recipe, records

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write the tokenizer, and count the bytes of the weights."""
        self._records.settle_last()
        self._records.model = self._saved(session, tokenizer, folder, optimizer_bytes=0)

    def save_from_checkpoint(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, checkpoint: Path, folder: Path
    ) -> None:
        """Count the bytes of the weights, which every checkpoint has as many of."""
        self.save_trained(session, tokenizer, folder)

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """Write the tokenizer, and count the bytes of the weights and the optimizer's state."""
        self._records.settle_last()
        state = export_optimizer_state(session.optimizer, session.unwrapped_model.named_parameters())
        optimizer_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
        saved = self._saved(session, tokenizer, folder, optimizer_bytes=optimizer_bytes)
        self._records.checkpoints.append(saved)
        return state.scalars

    def _saved(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, *, optimizer_bytes: int
    ) -> Saved:
        save_tokenizer(tokenizer, folder)
        with self._gpu.during("save"), session.techniques.at_rest():
            weight_bytes = _bytes_in_files(
                session.unwrapped_model, adapters_alone=self._recipe.adapter.name != "none"
            )
        other_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        parts = other_parts(session.unwrapped_model)
        if parts is not None and self._recipe.adapter.name == "none":
            other_bytes += parts.num_bytes
        return Saved(
            at_step=self._records.step,
            weight_bytes=weight_bytes,
            optimizer_bytes=optimizer_bytes,
            other_bytes=other_bytes,
        )

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """Read nothing: a trace has no values."""


def rehearsal_runtime(
    gpu: VirtualGPU, recipe: Recipe, records: Records, on_step: Callable[[int, int], None]
) -> Runtime:
    """Return the surroundings of a run without values, in one process.

    The loop sees a device called ``cuda``, as in a run; the virtual GPU answers whatever the loop asks of it.

    Args:
        gpu: the virtual GPU, inside whose block everything runs.
        recipe: the run's.
        records: notes what is traced and counted.
        on_step: called with the number of each step, and the number of shapes traced.
    """
    device = torch.device("cuda")  # Accelerate's name for it
    host = _RehearsedHost(gpu.recorder.timeline)
    machine = VirtualMachine(gpu, recipe.training.mixed_precision, device, host)
    ranks = VirtualRanks(gpu, machine.device)
    return Runtime(
        machine=machine,
        ranks=ranks,
        files=_CountedFiles(ranks, gpu, recipe, records),
        values=_RehearsedValues(gpu, machine, ranks, recipe, records, on_step),
    )


def _bytes_in_files(model: nn.Module, *, adapters_alone: bool = False) -> int:
    """Return the bytes of weights in a model's files, in which tensors that share their memory are one."""
    if adapters_alone:
        return sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    tensors = model.state_dict(keep_vars=True).values()
    places = {(storage_key(each), each.storage_offset(), each.shape): each for each in tensors}
    return sum(tensor.nbytes for tensor in places.values())


class _RehearsedHost(Host):
    """The host of a rehearsed run: libraries and the trace's host allocations, not what this machine's host holds.

    Weights in transit while files are read and written are not in a trace; the estimate adds them
    (``planning/estimator/run_host_memory.py``).

    Args:
        timeline: the timeline of the tracing machine.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._seen = 0
        self._alive: dict[int, int] = {}
        self._live_bytes = self._most_bytes = 0

    def held_bytes(self) -> int:
        """Return the bytes held now, without page cache of files."""
        self._catch_up()
        return HOST_BYTES_WITH_CUDA + self._live_bytes

    def peak_bytes(self, file_bytes: int) -> int:
        """Return the most bytes held, without page cache: the trace has files on the disk."""
        self._catch_up()
        return HOST_BYTES_WITH_CUDA + self._most_bytes

    def limit(self, file_bytes: int) -> None:
        """Return None: neither the machine's memory nor its other load is known."""

    def _catch_up(self) -> None:
        events, allocations = self._timeline.events, self._timeline.allocations
        for kind, index in events[self._seen :]:
            if kind == "free":
                self._live_bytes -= self._alive.pop(index, 0)
            elif kind == "malloc" and allocations[index].place in ON_HOST:
                self._alive[index] = allocations[index].size_bytes
                self._live_bytes += allocations[index].size_bytes
            self._most_bytes = max(self._most_bytes, self._live_bytes)
        self._seen = len(events)
