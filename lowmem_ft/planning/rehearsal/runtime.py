"""Runtime of a rehearsal: a virtual GPU in place of the device; one traced step represents all steps of its shape."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.live_tensors import storage_key
from lowmem_ft.models.other_parts import other_parts
from lowmem_ft.models.saving import save_tokenizer
from lowmem_ft.optimizers import export_optimizer_state
from lowmem_ft.planning.estimator.answers import TracedAnswer, trace_answer
from lowmem_ft.planning.estimator.runtime import VirtualRuntime
from lowmem_ft.planning.estimator.traces.tracing import NUM_MICRO_BATCHES
from lowmem_ft.planning.rehearsal.host import RehearsedHost
from lowmem_ft.planning.rehearsal.host_waits import HostWaits
from lowmem_ft.planning.rehearsal.window_shapes import (
    MOST_EVALUATION_SHAPES,
    MOST_SHAPES,
    Counted,
    Shapes,
    WindowShape,
    in_shape,
    tensors_of,
)
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.training.out_of_memory.budget_cap import Host
from lowmem_ft.training.run_runtime import RunRuntime
from lowmem_ft.training.schedule import create_scheduler
from lowmem_ft.training.session import Session
from lowmem_ft.training.step import StepResult
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


@dataclass(kw_only=True)
class Traced:
    """A part of the run that was traced.

    Args:
        shape: shape of its data.
        at_step: the step it belongs to, from 1.
        work: range of its entries in the log of work, end exclusive.
        positions: range of its events in the timeline, likewise.
        sample_ids: the examples of that data.
        is_exact: whether its data has its original shape, and was not padded to another.
        waits: number of host waits in it, by the line of code.
    """

    shape: WindowShape
    at_step: int
    work: tuple[int, int]
    positions: tuple[int, int]
    sample_ids: tuple[int, ...]
    is_exact: bool
    waits: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Sizes of the files of one checkpoint or model.

    Args:
        at_step: the step after which it was written.
        weight_bytes: trained weights.
        optimizer_bytes: optimizer state; 0 in a finished model.
        other_bytes: the tokenizer, and parts of the checkpoint that are not trained.
    """

    at_step: int
    weight_bytes: int
    optimizer_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self.weight_bytes + self.optimizer_bytes + self.other_bytes


class RehearsalRuntime(VirtualRuntime, RunRuntime):
    """The surroundings of a run without values, in one process.

    The loop sees a device called ``cuda``, as in a run; the virtual GPU answers whatever the loop asks of it.

    Args:
        machine: the virtual GPU, inside whose block everything runs.
        recipe: the run's.
        on_step: called with the number of each step, and the number of shapes traced.

    Attributes:
        steps: traced steps, without the run's very first step, whose shape is traced again.
        windows: number of windows by the shapes they count as: of each micro-batch, or in vertical order of the whole.
        evaluated: number of held-out batches, likewise.
        evaluations: traced held-out batches.
        answer: the traced answer to the longest prompt so far; None: the run answers none.
        answers: number of answers by the step.
        num_tokens: tokens of all windows, without padding.
        num_label_tokens: label tokens, likewise.
        padded_tokens: tokens of all windows, padding included.
        rounded_tokens: tokens of the shapes that they count as.
        checkpoints: those written, in order.
        model: the finished one; None: the run has not come to its end.
        num_steps: number of rehearsed steps.
        first_step: the number of the step before them.
    """

    computes_values = False

    def __init__(self, machine: VirtualGPU, recipe: Recipe, on_step: Callable[[int, int], None]) -> None:
        super().__init__(machine, recipe.training, device=torch.device("cuda"))  # Accelerate's name for it
        self.steps: list[Traced] = []
        self.evaluations: list[Traced] = []
        self.windows: Counter[tuple[Counted, ...]] = Counter()
        self.evaluated: Counter[Counted] = Counter()
        self.num_evaluations = 0
        self.answer: TracedAnswer | None = None
        self.answers: Counter[int] = Counter()
        self._longest_answer = 0
        self.num_tokens = self.num_label_tokens = self.padded_tokens = self.rounded_tokens = 0
        self.checkpoints: list[Saved] = []
        self.model: Saved | None = None
        self.num_steps = self.first_step = 0
        self.waits = HostWaits(machine.work)
        self.host: Host = RehearsedHost(machine.recorder.timeline)
        self.progress_console: Console | None = _unseen_terminal()
        self._recipe = recipe
        self._on_step = on_step
        self._takes_window = key_with(recipe, "whole window at once") is not None
        self._shapes, self._evaluation_shapes = Shapes(MOST_SHAPES), Shapes(MOST_EVALUATION_SHAPES)
        self._settle: Callable[[], None] = machine.step_is_over

    # --- steps --------------------------------------------------------------------------------------------------------

    def schedule(
        self, optimizer: torch.optim.Optimizer, config: TrainingConfig, num_training_steps: int
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the run's own scheduler: learning rates are numbers on the host."""
        self._scheduler = create_scheduler(optimizer, config, num_training_steps)
        return self._scheduler

    def take_step(self, window: Sequence[Batch], step: Callable[[Sequence[Batch]], StepResult]) -> StepResult:
        """Trace a step for each new shape; count the others."""
        self._settle_last()
        self.num_steps += 1
        result, units = None, []
        for unit in [window] if self._takes_window else [[batch] for batch in window]:
            counted, is_new = self._shapes.class_of(WindowShape.of(unit))
            if is_new:
                self._settle_last()
                result = None  # the result so far is of another shape in the same window
                result = self._trace_step(unit, counted.shape, step)
            units.append(counted)
            self.padded_tokens += counted.tokens
            self.rounded_tokens += counted.shape.tokens
        self.windows[tuple(units)] += 1
        num_tokens = sum(batch.num_tokens for batch in window)
        self.num_tokens += num_tokens
        self.num_label_tokens += sum(batch.num_label_tokens for batch in window)
        self._on_step(self.num_steps, len(self.steps))
        if result is None:
            self._scheduler.step()
            return StepResult(loss=0.0, grad_norm=0.0, num_tokens=num_tokens, applied=True, overflow=False)
        return dataclasses.replace(result, num_tokens=num_tokens)

    def _trace_step(
        self, unit: Sequence[Batch], shape: WindowShape, step: Callable[[Sequence[Batch]], StepResult]
    ) -> StepResult:
        window = in_shape(unit, shape)
        for tensor in tensors_of(window):
            self.machine.mark(tensor, "input")
        if not self._takes_window:
            window *= min(NUM_MICRO_BATCHES, self._recipe.training.gradient_accumulation_steps)
        if not self.steps:  # the first step allocates what all others find
            before = self._scheduler.state_dict()
            step(window)
            self._scheduler.load_state_dict(before)
            self.machine.step_is_over()
            self.waits.take()
        begin = self._here()
        result = step(window)
        self._note(self.steps, shape, begin, unit)
        return result

    # --- evaluation ---------------------------------------------------------------------------------------------------

    def to_evaluate(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield one batch of each shape; count the others."""
        self._settle_last()
        self.num_evaluations += 1
        for batch in batches:
            counted, is_new = self._evaluation_shapes.class_of(WindowShape.of([batch]))
            self.evaluated[counted] += 1
            if not is_new:
                continue
            self._settle_last()
            rows = in_shape([batch], counted.shape)[0]
            for tensor in tensors_of([rows]):
                self.machine.mark(tensor, "input")
            begin = self._here()
            with self.machine.during("evaluation"):
                yield rows
            self._note(self.evaluations, counted.shape, begin, [batch], is_step=False)
        self._settle_last()

    def generate(
        self, session: Session, input_ids: Sequence[int], max_new_tokens: int, end_ids: Sequence[int]
    ) -> list[int] | None:
        """Trace the answer to a prompt longer than all before it; every answer counts as the longest."""
        self._settle_last()
        self.answers[self.num_steps] += 1
        length = len(input_ids) + max_new_tokens
        if length > self._longest_answer:
            self._longest_answer = length
            with self.machine.during("evaluation"):
                self.answer = trace_answer(session, length, self.machine)
            self.waits.take()
        return None

    # --- what is traced -----------------------------------------------------------------------------------------------

    def _here(self) -> tuple[int, int]:
        work = self.machine.work
        return len(work.entries), work.position

    def _note(
        self,
        traced: list[Traced],
        shape: WindowShape,
        begin: tuple[int, int],
        batches: Sequence[Batch],
        *,
        is_step: bool = True,
    ) -> None:
        """Record the trace since ``begin``; what the loop reads of it afterwards belongs to it."""
        (first, start), (last, end) = begin, self._here()
        sample_ids = tuple(sample for batch in batches for sample in batch.sample_ids)
        one = Traced(
            shape=shape,
            at_step=self.first_step + self.num_steps,
            work=(first, last),
            positions=(start, end),
            sample_ids=sample_ids,
            is_exact=WindowShape.of(batches) == shape,
        )
        traced.append(one)

        def settle() -> None:
            one.waits = self.waits.take()
            if is_step:
                self.machine.step_is_over()

        self._settle = settle

    def _settle_last(self) -> None:
        self._settle()
        self._settle = lambda: None
        self.waits.take()

    # --- files --------------------------------------------------------------------------------------------------------

    def save_trained(self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write the tokenizer, and count the bytes of the weights."""
        self._settle_last()
        self.model = self._saved(session, tokenizer, folder, optimizer_bytes=0)

    def save_from_checkpoint(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, checkpoint: Path, folder: Path
    ) -> None:
        """Count the bytes of the weights, which every checkpoint has as many of."""
        self.save_trained(session, tokenizer, folder)

    def save_session(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, identity: str
    ) -> dict[str, Any]:
        """Write the tokenizer, and count the bytes of the weights and the optimizer's state."""
        self._settle_last()
        state = export_optimizer_state(session.optimizer, session.unwrapped_model.named_parameters())
        optimizer_bytes = sum(tensor.nbytes for tensor in state.tensors.values())
        self.checkpoints.append(self._saved(session, tokenizer, folder, optimizer_bytes=optimizer_bytes))
        return state.scalars

    def _saved(
        self, session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, *, optimizer_bytes: int
    ) -> Saved:
        save_tokenizer(tokenizer, folder)
        with self.machine.during("save"), session.techniques.at_rest():
            weight_bytes = _bytes_in_files(
                session.unwrapped_model, adapters_alone=self._recipe.adapter.name != "none"
            )
        other_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        parts = other_parts(session.unwrapped_model)
        if parts is not None and self._recipe.adapter.name == "none":
            other_bytes += parts.num_bytes
        return Saved(
            at_step=self.first_step + self.num_steps,
            weight_bytes=weight_bytes,
            optimizer_bytes=optimizer_bytes,
            other_bytes=other_bytes,
        )

    def load_session(self, session: Session, folder: Path, optimizer_scalars: dict[str, Any]) -> None:
        """Read nothing: a trace has no values."""

    def load_random_state(self, state: dict[str, Any]) -> None:
        """Load nothing: no random value is seen."""

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """Return host memory whose tensors name their device by the virtual one's own name."""
        self.device, device = self.machine.device, self.device
        try:
            return super().host_memory(budget, folder)
        finally:
            self.device = device


def _unseen_terminal() -> Console:
    """Return an invisible terminal for the run's progress: the rehearsal shows a line of its own."""
    return Console(quiet=True, force_terminal=True, width=80, legacy_windows=False)


def _bytes_in_files(model: nn.Module, *, adapters_alone: bool = False) -> int:
    """Return the bytes of weights in a model's files, in which tensors that share their memory are one."""
    if adapters_alone:
        return sum(weight.nbytes for weight in model.parameters() if weight.requires_grad)
    tensors = model.state_dict(keep_vars=True).values()
    places = {(storage_key(each), each.storage_offset(), each.shape): each for each in tensors}
    return sum(tensor.nbytes for tensor in places.values())
