"""The steps of ``training.profile_steps``: profiled in the run's main process, and written into its folder."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from lowmem_ft.foundation.errors import Interrupted, raise_problems
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.system.atomic_write import write_whole_file
from lowmem_ft.foundation.system.malloc import return_free_memory
from lowmem_ft.monitoring.profiling.module_ranges import in_range
from lowmem_ft.monitoring.profiling.step_profile import BACKWARD, CLIPPING, DATA, FETCH, UPDATE
from lowmem_ft.monitoring.profiling.step_profiler import StepProfiler
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.techniques.modules.patching import call_around
from lowmem_ft.training.folder.replaced_run import PROFILE_FILE, PROFILE_TABLE, PROFILE_TRACE
from lowmem_ft.training.run.advice import advice_of

if TYPE_CHECKING:
    from typing_extensions import Self

    from lowmem_ft.training.run.loop import TrainingRun

logger = logging.getLogger(__name__)


class ProfiledSteps:
    """The profiler of a run, which works in the steps that its recipe names and in no other.

    Args:
        run: the run, with all other parts; only its main process is profiled.

    Raises:
        UserError: if the run ends before the last of these steps.
    """

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        recipe, step, num_steps = run.recipe, run.progress.step, run.num_steps
        first, last = recipe.training.profile_steps or (0, 0)
        raise_problems(recipe.training.profiled_after(num_steps))
        if first <= last <= step and last:
            logger.info(
                "training.profile_steps: the run resumes after step %d, so nothing is profiled.", last
            )
        is_profiled = run.runtime.ranks.is_main and run.runtime.values.are_real
        self._steps = range(max(first, step + 1), last + 1) if is_profiled and last else range(0)
        self._profiler: StepProfiler | None = None
        self._ranges = Handle()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End a profile in which the run was stopped; the steps until then are written, unless it failed."""
        self._end(writes=kind is not None and issubclass(kind, Interrupted))

    def is_due(self, step: int) -> bool:
        """Return whether a step is profiled, which takes longer than others."""
        return step in self._steps

    @contextlib.contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Profile a step if it is one of those; write the profile after the last of them."""
        if not self.is_due(step):
            yield
            return
        if self._profiler is None:
            self._begin(step)
        assert self._profiler is not None, "it has begun"
        with self._profiler.step():  # no other name refers to it, so that its end frees it
            yield
        if step == self._steps[-1]:
            self._end(writes=True)

    def _begin(self, step: int) -> None:
        session, machine = self._run.session, self._run.runtime.machine
        self._profiler = StepProfiler(session.unwrapped_model, machine.device, first_step=step)
        self._profiler.__enter__()
        parts: list[tuple[Any, str, str]] = [
            (self._run.stream, "next_window", DATA),
            (machine, "backward", BACKWARD),
            (session.techniques, "clip_grad_norm", CLIPPING),
            (machine, "clip_grad_norm", CLIPPING),
            (machine, "fetch", FETCH),
            (session.techniques, "update_weights", UPDATE),
            (machine, "update_weights", UPDATE),
        ]
        if isinstance(session.optimizer, ChunkedOptimizer):
            parts.append((session.optimizer, "update", UPDATE))  # in backward, or when a layer is visited
        self._ranges = Handle(*(call_around(owner, name, in_range(part)) for owner, name, part in parts))

    def _end(self, *, writes: bool) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self._ranges.remove()
        profiler.__exit__(None, None, None)
        if writes:
            self._write(profiler)
        del profiler
        gc.collect()  # hundreds of thousands of events refer to each other
        return_free_memory()

    def _write(self, profiler: StepProfiler) -> None:
        run, path = self._run, self._run.folder.path
        estimate = run.memory.estimate
        predicted = {} if estimate is None or estimate.step is None else estimate.step.by_operator
        found = profiler.result(predicted)
        found = dataclasses.replace(found, advice=advice_of(found, run.recipe, run.session.unwrapped_model))
        try:
            profiler.write_trace(path / PROFILE_TRACE)
            write_whole_file(path / PROFILE_TABLE, found.table() + "\n")
            write_whole_file(path / PROFILE_FILE, json.dumps(found.to_json()))
        except OSError as error:
            logger.warning(
                "The profile of training.profile_steps cannot be written: %s. The run continues.", error
            )
            return
        logger.info("%s. Trace: %s; table: %s.", found.title, path / PROFILE_TRACE, path / PROFILE_TABLE)
        for sentence in found.advice:
            logger.info("  %s", sentence)
