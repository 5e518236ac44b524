"""Rows of a profile with modules alike as one, except for a module that is slower than the others in every step."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from torch import nn

from lowmem_ft.monitoring.module_pattern import module_pattern
from lowmem_ft.monitoring.profiling.step_profile import OUTSIDE, ProfileRow, SlowModule

TIMES_SLOWER, LEAST_SHARE = 2.0, 0.02
"""A module is slow if it takes this many times the median of those like it, and is this share of the step above it."""


class ModulesAlike:
    """Means of some steps, with a row for modules whose names differ in places of lists only.

    Args:
        model: the model.
        steps: the rows of each step, with the full name of each module.
        of_device: whether seconds of the device count, else those of the host.
        step_seconds: mean seconds of a step.

    Attributes:
        slow: the modules that take at least ``TIMES_SLOWER`` times as long as those like them, the slowest first. In a
            step that others disturb, any module may be slow: the least of its steps counts.
        classes: class of each module in the rows, by its name there.
    """

    def __init__(
        self,
        model: nn.Module,
        steps: Sequence[Sequence[ProfileRow]],
        *,
        of_device: bool,
        step_seconds: float,
    ) -> None:
        self._steps = steps
        modules = dict(model.named_modules())
        alike: dict[tuple[str, str], list[str]] = {}
        for name in dict.fromkeys(row.module for rows in steps for row in rows):
            if name in modules:
                alike.setdefault((module_pattern(model, name), type(modules[name]).__name__), []).append(name)
        seconds = [_by_module(rows, of_device=of_device) for rows in steps]
        slow = (
            one for names in alike.values() for one in _slower(names, seconds, LEAST_SHARE * step_seconds)
        )
        self.slow = sorted(slow, key=lambda one: one.seconds, reverse=True)
        self.classes: dict[str, str] = {}
        self._shown = {OUTSIDE: OUTSIDE}
        apart = {one.module for one in self.slow}
        for (pattern, kind), names in alike.items():
            together = len(names) > 1 + len(apart.intersection(names))
            for name in names:
                self._shown[name] = pattern if together and name not in apart else name
                self.classes[self._shown[name]] = kind

    def rows(self) -> Iterator[ProfileRow]:
        """Yield a row for each part of the step, module or modules alike, and operator."""
        sums: dict[tuple[str, str, str], ProfileRow] = {}
        for row in (row for rows in self._steps for row in rows):
            module = self._shown.get(row.module, row.module)
            key = row.part, module, row.operator
            sums[key] = _sum(sums[key], row) if key in sums else replace(row, module=module)
        for one in sums.values():
            yield replace(
                one,
                calls=one.calls / len(self._steps),
                host_seconds=one.host_seconds / len(self._steps),
                device_seconds=one.device_seconds / len(self._steps),
                wait_seconds=one.wait_seconds / len(self._steps),
            )


def _by_module(rows: Iterable[ProfileRow], *, of_device: bool) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for row in rows:
        seconds[row.module] += row.device_seconds if of_device else row.host_seconds
    return seconds


def _slower(names: Sequence[str], steps: Sequence[Mapping[str, float]], least: float) -> Iterator[SlowModule]:
    if len(names) < 2:
        return
    of_each = {name: min(seconds.get(name, 0.0) for seconds in steps) for name in names}
    median = statistics.median_low(of_each.values())
    for name, seconds in of_each.items():
        if seconds >= TIMES_SLOWER * median and seconds - median >= least:
            yield SlowModule(module=name, seconds=seconds, others_seconds=median)


def _sum(one: ProfileRow, other: ProfileRow) -> ProfileRow:
    return replace(
        one,
        calls=one.calls + other.calls,
        host_seconds=one.host_seconds + other.host_seconds,
        device_seconds=one.device_seconds + other.device_seconds,
        wait_seconds=one.wait_seconds + other.wait_seconds,
    )
