"""Numbers from the trace of a rehearsed loop: seconds by shape, length of the run, and where memory runs out."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lowmem_ft.foundation.catalog.context_overhead import process_overhead_bytes
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.allocator.replay import replay
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate, ModelSize, StepTime
from lowmem_ft.models.hf_config import load_model_config, weights_dtype
from lowmem_ft.planning.estimator.device_target import capped_bytes, limits
from lowmem_ft.planning.rehearsal.records import Records, Traced
from lowmem_ft.planning.rehearsal.result import (
    DISK_BYTES_PER_SECOND,
    Failure,
    Rehearsal,
    RunTime,
    TracedShape,
)
from lowmem_ft.planning.rehearsal.seconds_by_tokens import SecondsByTokens
from lowmem_ft.planning.rehearsal.window_shapes import Counted, WindowShape
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.replay.timing.clock import Times
from lowmem_ft.virtual_gpu.replay.trace_estimate import allocator_config_of_runs

if TYPE_CHECKING:
    from lowmem_ft.planning.rehearsal.rehearse import RehearsedRun


@dataclass(frozen=True)
class _StepSeconds:
    """Seconds of a step of one shape: outside its micro-batches, of the first of them, and of each other one.

    Micro-batches that pass through the layers together count as one.
    """

    beside: float
    first: float
    other: float


@dataclass(frozen=True)
class _SecondsByShape:
    """Numbers of micro-batches counted as each shape, and the seconds that they take together."""

    times: Counter[WindowShape] = field(default_factory=Counter)
    seconds: dict[WindowShape, float] = field(default_factory=dict)

    def add(self, shape: WindowShape, seconds: float, times: int) -> None:
        """Add micro-batches that take this many seconds each."""
        self.times[shape] += times
        self.seconds[shape] = self.seconds.get(shape, 0.0) + seconds * times

    def mean(self, shape: WindowShape) -> float:
        """Return the mean seconds of one; 0 if there is not one."""
        return self.seconds.get(shape, 0.0) / max(self.times[shape], 1)

    @property
    def total(self) -> float:
        """Seconds of all."""
        return sum(self.seconds.values())


class Findings:
    """Numbers from the trace of a rehearsed run.

    Args:
        recipe: the rehearsed one.
        gpu: the GPU whose timing model and memory count.
        run: the records of its loop.
        trace: trace of the whole run.
    """

    def __init__(self, recipe: Recipe, gpu: Gpu, run: RehearsedRun, trace: Trace) -> None:
        self._recipe, self._gpu, self._run = recipe, gpu, run
        self._records: Records = run.records
        self._trace = trace
        self.replays = Replays(trace, allocator_config_of_runs(gpu))
        self._times: Times = self.replays.clock.times_on(gpu)
        self._seconds = {step.shape: self._step_seconds(step) for step in self._records.steps}
        self._by_tokens = SecondsByTokens((shape.tokens, one.other) for shape, one in self._seconds.items())

    @property
    def longest(self) -> WindowShape:
        """The largest shape of a step."""
        return max((step.shape for step in self._records.steps), key=lambda shape: shape.tokens)

    def mean_step(self, estimate: MemoryEstimate) -> StepTime | None:
        """Return the mean step; None if no step was rehearsed or the GPU has no timing model."""
        if estimate.step is None or not self._records.num_steps:
            return None
        return StepTime(
            seconds=self._seconds_of_steps / self._records.num_steps,
            tokens=round(self._records.num_tokens / self._records.num_steps),
            bound_by=estimate.step.bound_by,
            sent_bytes=0,
            seconds_share=estimate.step.seconds_share,
            unlike_measured=estimate.step.unlike_measured,
            host_share=estimate.step.host_share,
            host_range=estimate.step.host_range,
        )

    def rehearsal(
        self, estimate: MemoryEstimate, worst: MemoryEstimate, warnings: tuple[str, ...], seconds: float
    ) -> Rehearsal:
        """Return all results together.

        Args:
            estimate: estimate of this trace.
            worst: estimate of the recipe's worst batch.
            warnings: logged warnings.
            seconds: seconds that the rehearsal took.
        """
        records, num_steps = self._records, self._run.num_steps
        share = num_steps / records.num_steps if records.num_steps else 0.0
        is_whole = records.num_steps == num_steps
        training = self._recipe.training
        num_evaluations, num_checkpoints = self._num_evaluations, len(records.checkpoints)
        micro_batches, update_seconds = self._seconds_by_part()
        if not is_whole:
            num_evaluations = _times_due(num_steps - 1, training.eval_steps) + bool(records.evaluated)
            num_checkpoints = _times_due(num_steps, training.save_steps)
        if training.load_best_model_at_end:
            num_checkpoints = _most_checkpoints(num_steps, training)
        return Rehearsal(
            recipe=self._recipe,
            gpu=self._gpu,
            estimate=estimate,
            worst=worst,
            num_steps=num_steps,
            rehearsed_steps=records.num_steps,
            tokens=round(records.num_tokens * share),
            label_tokens=round(records.num_label_tokens * share),
            padded_tokens=records.padded_tokens,
            rounded_tokens=records.rounded_tokens,
            interpolation_error=self._by_tokens.error,
            steps=self._shapes(records.steps, micro_batches),
            update_seconds=update_seconds,
            evaluations=self._shapes(records.evaluations, self._evaluated()),
            num_evaluations=num_evaluations,
            checkpoints=tuple(records.checkpoints),
            num_checkpoints=num_checkpoints,
            kept_checkpoints=min(num_checkpoints, _most_kept(training) or num_checkpoints),
            model=records.model,
            time=self._time(share, num_evaluations, num_checkpoints, self._read_bytes(estimate.model)),
            download_bytes=self._download_bytes(estimate.model),
            failure=self._failure(estimate),
            warnings=warnings,
            seconds=seconds,
        )

    # --- time ---------------------------------------------------------------------------------------------------------

    def _step_seconds(self, step: Traced) -> _StepSeconds:
        first, last = step.work
        whole = self._times.between(first, last).seconds
        bounds = [one for one in self._trace.micro_batches if first <= one[0] < last]
        if step.shape.num_micro_batches > 1 or not bounds:  # the micro-batches of a window pass together
            return _StepSeconds(beside=0.0, first=whole, other=whole)
        micro_batches = [self._times.between(*one).seconds for one in bounds]
        return _StepSeconds(
            beside=max(0.0, whole - sum(micro_batches)), first=micro_batches[0], other=micro_batches[-1]
        )

    def _seconds_by_part(self) -> tuple[_SecondsByShape, float]:
        """Return the seconds of micro-batches in all rehearsed steps, and the mean seconds per step outside of them."""
        micro_batches, outside = _SecondsByShape(), 0.0
        for units, times in self._records.windows.items():
            outside += self._seconds[units[0].shape].beside * times
            for index, one in enumerate(units):
                of_shape = self._seconds[one.shape]
                seconds = of_shape.other if index else of_shape.first
                micro_batches.add(one.shape, seconds * _share(one, self._by_tokens), times)
        return micro_batches, outside / max(self._records.num_steps, 1)

    @property
    def _seconds_of_steps(self) -> float:
        micro_batches, outside = self._seconds_by_part()
        return micro_batches.total + outside * self._records.num_steps

    @property
    def _num_evaluations(self) -> int:
        """Rehearsed evaluations, each of all sources."""
        return self._records.num_evaluations // self._run.num_held_out_sources

    def _evaluated(self) -> _SecondsByShape:
        """Return the seconds of batches in all rehearsed evaluations."""
        traced = {one.shape: self._times.between(*one.work).seconds for one in self._records.evaluations}
        by_tokens = SecondsByTokens((shape.tokens, seconds) for shape, seconds in traced.items())
        found = _SecondsByShape()
        for one, times in self._records.evaluated.items():
            found.add(one.shape, traced[one.shape] * _share(one, by_tokens), times)
        return found

    def _read_bytes(self, model: ModelSize) -> int:
        """Return the bytes of the model's files, without adapters; for a quantized model, an upper bound."""
        config = self._recipe.model
        if config.weights == "random":
            return 0
        stored = dataclasses.replace(config, dtype="auto")
        dtype = weights_dtype(stored, load_model_config(config, architecture_only=True))
        of_adapter = 0 if self._recipe.adapter.name == "none" else model.trainable_parameters
        return (model.parameters - of_adapter) * dtype.itemsize

    def _download_bytes(self, model: ModelSize) -> int:
        """Return the bytes of the model's files on the hub; 0 if they are a folder of this machine."""
        if Path(self._recipe.model.name_or_path or "").is_dir():
            return 0
        return self._read_bytes(
            dataclasses.replace(model, parameters=model.parameters + model.other_parameters)
        )

    def _time(self, share: float, num_evaluations: int, num_checkpoints: int, read_bytes: int) -> RunTime:
        records = self._records
        once = self._evaluated().total / max(self._num_evaluations, 1)
        saved = records.checkpoints[-1].total_bytes * num_checkpoints if records.checkpoints else 0
        saved += records.model.total_bytes if records.model else 0
        return RunTime(
            loading=read_bytes / DISK_BYTES_PER_SECOND,
            steps=self._seconds_of_steps * share,
            evaluations=once * num_evaluations + self._seconds_of_answers(),
            saving=saved / DISK_BYTES_PER_SECOND,
        )

    def _seconds_of_answers(self) -> float:
        """Return the seconds of all answers of the run: each has the longest prompt and the most tokens."""
        answer, training = self._records.answer, self._recipe.training
        if answer is None:
            return 0.0
        prompt, token = (self._times.between(*one).seconds for one in (answer.prompt, answer.token))
        prompts = max(self._records.answers.values())
        times = (
            _times_due(self._run.num_steps - 1, training.eval_steps) + 2
        )  # and at the start, and at the end
        return times * prompts * (prompt + (training.max_new_tokens - 1) * token)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _shapes(self, traced: Iterable[Traced], seconds: _SecondsByShape) -> tuple[TracedShape, ...]:
        allocated = self.replays.unlimited.allocated_bytes
        found = [
            TracedShape(
                shape=one.shape,
                at_step=one.at_step,
                times=seconds.times[one.shape],
                seconds=seconds.mean(one.shape),
                peak_bytes=max(allocated[slice(*one.positions)], default=0),
                is_exact=one.is_exact,
                waits=dict(one.waits.most_common()),
            )
            for one in traced
        ]
        return tuple(sorted(found, key=lambda one: (one.shape.tokens, one.shape.label_tokens), reverse=True))

    def _failure(self, estimate: MemoryEstimate) -> Failure | None:
        """Return where the allocator fails within the limits of the GPU and the budget; None: nowhere."""
        budget, gpu = self._recipe.budget, self._gpu
        overhead = process_overhead_bytes(
            gpu, uses_bitsandbytes=self._recipe.uses_bitsandbytes, num_processes=1
        )
        limit = limits(gpu, budget).device_bytes
        assert limit is not None, "a GPU has a timing model"
        allocator = CachingAllocator(
            self.replays.allocator,
            capacity_bytes=min(limit, gpu.available_bytes) - sum(overhead.values()),
            allowed_bytes=capped_bytes(budget, overhead),
        )
        found = replay(self._trace.timeline, allocator)
        position = found.out_of_memory_at
        if position is None:
            return None
        request = self._trace.timeline.allocations[self._trace.timeline.events[position].allocation]
        part = self._part_at(position)
        return Failure(
            phase=request.phase,
            module=request.module,
            requested_bytes=request.size_bytes,
            at_step=None if position < self._run.load_end else 1 if part is None else part.at_step,
            shape=None if part is None else part.shape,
            sample_ids=() if part is None else part.sample_ids,
        )

    def _part_at(self, position: int) -> Traced | None:
        """Return what was running, or the last step before; None while the model was loaded."""
        if position < self._run.load_end:
            return None
        parts = sorted((*self._records.steps, *self._records.evaluations), key=lambda one: one.positions)
        began = [one for one in parts if one.positions[0] <= position]
        # The very first step is traced twice, and reported by the second trace.
        return (began or parts)[-1 if began else 0]


def _share(one: Counted, by_tokens: SecondsByTokens) -> float:
    """Return its share of its shape's seconds."""
    return by_tokens.share(one.tokens, of=one.shape.tokens)


def _times_due(steps: int, every: int | None) -> int:
    return 0 if every is None else steps // every


def _most_checkpoints(steps: int, training: TrainingConfig) -> int:
    """Return the checkpoints of a run that keeps the best model, if each evaluation is better than the one before."""
    saved = range(training.save_steps or steps + 1, steps + 1, training.save_steps or 1)
    evaluated = range(training.eval_steps or steps, steps, training.eval_steps or 1)
    return len({*saved, *evaluated})


def _most_kept(training: TrainingConfig) -> int | None:
    """Return the most checkpoints that are kept, the best one among them; None: all."""
    limit = training.save_total_limit
    return 2 if limit == 1 and training.load_best_model_at_end else limit
