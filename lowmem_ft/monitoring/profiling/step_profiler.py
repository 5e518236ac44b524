"""A profiler of training steps that tells the module of every operator, forward and backward."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.monitoring.module_pattern import module_pattern
from lowmem_ft.monitoring.profiling.event_rows import EventRows, busy_seconds, seconds_of_steps
from lowmem_ft.monitoring.profiling.module_ranges import STEP, ModuleRanges
from lowmem_ft.monitoring.profiling.step_profile import OUTSIDE, ProfileRow, SlowModule, StepProfile

if TYPE_CHECKING:
    from typing_extensions import Self

TIMES_SLOWER, LEAST_SHARE = 2.0, 0.01
"""A module is slow if it takes this many times the median of those like it, and is this share of the step above it."""


class StepProfiler:
    """A block in which training steps are profiled: by part of the step, by operator, and by module.

    Modules have hooks inside the block and none after it. Numbers do not change; the steps take longer.

    Args:
        model: the model, with all of its modules.
        device: the device that computes.
        first_step: number of the first step.
    """

    def __init__(self, model: nn.Module, device: torch.device | str = "cpu", *, first_step: int = 1) -> None:
        self._model = model
        self._device = torch.device(device).type
        self._first, self._num_steps = first_step, 0
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells of its start and its stop on stderr
        self._profile = profile(activities=activities)
        self._ranges: ModuleRanges | None = None

    def __enter__(self) -> Self:
        self._profile.start()
        self._ranges = ModuleRanges(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._ranges is not None, "the block has begun"
        self._ranges.remove()
        if self._device == "cuda":
            torch.cuda.synchronize()
        self._profile.stop()

    def step(self) -> AbstractContextManager[object]:
        """Return the block of one step, from its data to its update."""
        self._num_steps += 1
        return record_function(STEP)

    def write_trace(self, file: Path) -> None:
        """Write the trace, for Perfetto or Chrome; call it after the block.

        Args:
            file: its name ends in ``.json``, or in ``.json.gz`` for a compressed one.
        """
        self._profile.export_chrome_trace(str(file))

    def result(self, predicted: Mapping[str, float] | None = None) -> StepProfile:
        """Return where the time went; call it after the block.

        Args:
            predicted: seconds of a step by operator on an estimate's clock, to be shown next to those measured.

        Returns:
            The means over the steps.

        Raises:
            UserError: if no step ended in the block.
        """
        events = self._profile.events() or []
        seconds = list(seconds_of_steps(events))
        if not seconds:
            raise UserError("No step was profiled: put each training step into a `with profiler.step():` block.")
        rows = EventRows(events, as_one=predicted or ()).rows(len(seconds))
        step_seconds = math.fsum(seconds) / len(seconds)
        folded = Folded(self._model, rows, of_device=self._device != "cpu", step_seconds=step_seconds)
        return StepProfile(
            steps=(self._first, self._first + len(seconds) - 1),
            num_steps=len(seconds),
            step_seconds=step_seconds,
            device=self._device,
            busy_seconds=busy_seconds(events) / len(seconds),
            rows=tuple(folded.rows()),
            classes=folded.classes,
            slow=tuple(folded.slow),
            predicted=dict(predicted or {}),
        )


class Folded:
    """Rows of modules alike as one, except for a module that is slower than the others.

    Args:
        model: the model.
        rows: rows with the full name of each module.
        of_device: whether seconds of the device count, else those of the host.
        step_seconds: seconds of a step.
    """

    def __init__(
        self, model: nn.Module, rows: Sequence[ProfileRow], *, of_device: bool, step_seconds: float
    ) -> None:
        self._rows = rows
        seconds: dict[str, float] = {}
        for row in rows:
            own = row.device_seconds if of_device else row.host_seconds
            seconds[row.module] = seconds.get(row.module, 0.0) + own
        modules = dict(model.named_modules())
        known = [name for name in seconds if name in modules]
        alike: dict[tuple[str, str], list[str]] = {}
        for name in known:
            alike.setdefault((module_pattern(model, name), type(modules[name]).__name__), []).append(name)
        self.slow = sorted(
            _slower(alike.values(), seconds, LEAST_SHARE * step_seconds), key=lambda one: one.seconds, reverse=True
        )
        apart = {one.module for one in self.slow}
        self._shown = {OUTSIDE: OUTSIDE}
        self.classes: dict[str, str] = {}
        for (pattern, kind), names in alike.items():
            together = [name for name in names if name not in apart]
            for name in names:
                self._shown[name] = pattern if name not in apart and len(together) > 1 else name
                self.classes[self._shown[name]] = kind

    def rows(self) -> Iterator[ProfileRow]:
        """Yield a row for each part, module or modules alike, and operator."""
        together: dict[tuple[str, str, str], ProfileRow] = {}
        for row in self._rows:
            module = self._shown[row.module]
            key = (row.part, module, row.operator)
            one = together.get(key)
            together[key] = replace(row, module=module) if one is None else _sum(one, row)
        yield from together.values()


def _slower(
    alike: Collection[list[str]], seconds: Mapping[str, float], least: float
) -> Iterator[SlowModule]:
    for names in alike:
        if len(names) < 2:
            continue
        median = statistics.median_low(seconds[name] for name in names)
        for name in names:
            if seconds[name] >= TIMES_SLOWER * median and seconds[name] - median >= least:
                yield SlowModule(module=name, seconds=seconds[name], others_seconds=median)


def _sum(one: ProfileRow, other: ProfileRow) -> ProfileRow:
    return replace(
        one,
        calls=one.calls + other.calls,
        host_seconds=one.host_seconds + other.host_seconds,
        device_seconds=one.device_seconds + other.device_seconds,
        wait_seconds=one.wait_seconds + other.wait_seconds,
    )
