"""A profiler of training steps that tells the module of every operator, forward and backward."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.monitoring.profiling.event_rows import EventRows, busy_seconds, seconds_of_steps
from lowmem_ft.monitoring.profiling.module_ranges import STEP, ModuleRanges
from lowmem_ft.monitoring.profiling.modules_alike import ModulesAlike
from lowmem_ft.monitoring.profiling.step_profile import StepProfile

if TYPE_CHECKING:
    from typing_extensions import Self


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
        self._first = first_step
        activities = [ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it logs its start and stop to stderr
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
            raise UserError(
                "No step was profiled: put each training step into a `with profiler.step():` block."
            )
        steps = list(EventRows(events, as_one=predicted or ()).by_step())
        step_seconds = math.fsum(seconds) / len(seconds)
        alike = ModulesAlike(self._model, steps, of_device=self._device != "cpu", step_seconds=step_seconds)
        return StepProfile(
            steps=(self._first, self._first + len(seconds) - 1),
            num_steps=len(seconds),
            step_seconds=step_seconds,
            device=self._device,
            busy_seconds=busy_seconds(events) / len(seconds),
            rows=tuple(alike.rows()),
            classes=alike.classes,
            slow=tuple(alike.slow),
            predicted=dict(predicted or {}),
        )
