"""The records of a rehearsal: the parts of the run that it traces, and all that it counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lowmem_ft.data.batches.batch import Batch
from lowmem_ft.foundation.packages import own_folder
from lowmem_ft.planning.estimator.traced_answers import TracedAnswer
from lowmem_ft.planning.rehearsal.window_shapes import Counted, WindowShape
from lowmem_ft.virtual_gpu.calls.work import WorkLog
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.values.questions import asking_frames, shown_line


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


class Records:
    """The records of a rehearsal; its values and its files write them.

    Args:
        gpu: the virtual GPU, inside whose block everything runs.

    Attributes:
        steps: traced steps, without the run's very first step, whose shape is traced again.
        windows: number of windows by the shapes they count as: of each micro-batch, or in vertical order of the whole.
        evaluated: number of held-out batches, likewise.
        evaluations: traced held-out batches.
        num_evaluations: number of evaluations, of each source of held-out data.
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
        waits: counts the host's waits.
    """

    def __init__(self, gpu: VirtualGPU) -> None:
        self.steps: list[Traced] = []
        self.evaluations: list[Traced] = []
        self.windows: Counter[tuple[Counted, ...]] = Counter()
        self.evaluated: Counter[Counted] = Counter()
        self.num_evaluations = 0
        self.answer: TracedAnswer | None = None
        self.answers: Counter[int] = Counter()
        self.num_tokens = self.num_label_tokens = self.padded_tokens = self.rounded_tokens = 0
        self.checkpoints: list[Saved] = []
        self.model: Saved | None = None
        self.num_steps = self.first_step = 0
        self.waits = _HostWaits(gpu.work)
        self._gpu = gpu
        self._settle: Callable[[], None] = gpu.step_is_over

    @property
    def step(self) -> int:
        """The number of the run's current step."""
        return self.first_step + self.num_steps

    def here(self) -> tuple[int, int]:
        """Return the number of entries in the log of work, and of events in the timeline."""
        work = self._gpu.work
        return len(work.entries), work.position

    def note(
        self,
        traced: list[Traced],
        shape: WindowShape,
        begin: tuple[int, int],
        batches: Sequence[Batch],
        *,
        is_step: bool = True,
    ) -> None:
        """Record the trace since ``begin``; what the loop reads of it afterwards belongs to it."""
        (first, start), (last, end) = begin, self.here()
        sample_ids = tuple(sample for batch in batches for sample in batch.sample_ids)
        one = Traced(
            shape=shape,
            at_step=self.step,
            work=(first, last),
            positions=(start, end),
            sample_ids=sample_ids,
            is_exact=WindowShape.of(batches) == shape,
        )
        traced.append(one)

        def settle() -> None:
            one.waits = self.waits.take()
            if is_step:
                self._gpu.step_is_over()

        self._settle = settle

    def settle_last(self) -> None:
        """End what was noted last, before something else begins."""
        self._settle()
        self._settle = lambda: None
        self.waits.take()


_NOT_THE_PROGRAM = (
    str(Path(torch.__file__).parent),
    *map(own_folder, ("lowmem_ft.planning.rehearsal", "lowmem_ft.planning.estimator")),
)
"""Folders whose lines only replace those of the program, or are called by them."""


class _HostWaits:
    """Counts of host waits in a log of work, by the line that waits.

    Args:
        work: the log, whose waits are counted from now on.
    """

    def __init__(self, work: WorkLog) -> None:
        self._counts: Counter[str] = Counter()
        work.on_host_wait = self._count

    def take(self) -> Counter[str]:
        """Return the waits since the last call, as ``file:line``."""
        counts, self._counts = self._counts, Counter()
        return counts

    def _count(self, times: int) -> None:
        for frame in asking_frames():
            if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
                self._counts[shown_line(frame.f_code.co_filename, frame.f_lineno)] += times
                return
        self._counts["a line without source code"] += times
