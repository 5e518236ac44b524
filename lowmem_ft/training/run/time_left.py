"""Estimate of a run's remaining time, from the duration of its last steps, evaluations and saves."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Work = Literal["step", "evaluation", "save"]

LAST = {"step": 50, "evaluation": 5, "save": 5}
"""Number of durations averaged, by kind: rows differ in length, evaluations and saves hardly."""


@dataclass(kw_only=True)
class TimeLeft:
    """Remaining time: the mean duration of the last steps, evaluations and saves, times the number still to come.

    Evaluations and saves are included once one of their kind has been timed. The first step of a process, which
    compiles kernels and fills caches, counts only until there is a second.

    Args:
        num_steps: optimizer steps in all.
        step: steps taken so far.
        eval_steps: steps between two evaluations; None: there is no evaluation during training.
        save_steps: steps between two checkpoints; None: there is no checkpoint.
        evaluates_at_end: whether one more evaluation follows the last step.
        clock: returns seconds since an arbitrary moment.
    """

    num_steps: int
    step: int
    eval_steps: int | None
    save_steps: int | None
    evaluates_at_end: bool
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._is_first_step = False
        # Tuples that are replaced, not lists that change: the display reads them from its own thread.
        self._seconds: dict[Work, tuple[float, ...]] = {"step": (), "evaluation": (), "save": ()}
        self._made_at: dict[Work, int] = {}
        self._under_way: tuple[Work, float] | None = None

    @contextlib.contextmanager
    def during(self, work: Work) -> Iterator[None]:
        """Time one step, evaluation or save; one that an error ends does not count."""
        start = self.clock()
        self._under_way = (work, start)
        try:
            yield
        finally:
            self._under_way = None
        self._count(work, self.clock() - start)

    def _count(self, work: Work, seconds: float) -> None:
        before = self._seconds[work]
        if work == "step":
            self.step += 1
            if self._is_first_step:
                before = ()
            self._is_first_step = not self._seconds[work]
        self._made_at[work] = self.step
        self._seconds[work] = (*before, seconds)[-LAST[work] :]

    def seconds(self) -> float | None:
        """Return the seconds until the last step and its evaluation and save are done; None before a step was timed."""
        if not self._seconds["step"] and self.step < self.num_steps:
            return None
        left = sum(self._mean(work) * self._to_come(work) for work in self._seconds)
        if self._under_way is not None:
            work, start = self._under_way
            left -= min(self.clock() - start, self._mean(work))
        return max(0.0, left)

    def _mean(self, work: Work) -> float:
        seconds = self._seconds[work]
        return sum(seconds) / len(seconds) if seconds else 0.0

    def _to_come(self, work: Work) -> int:
        if work == "step":
            return self.num_steps - self.step
        due_from = self.step + (self._made_at.get(work) == self.step)
        if work == "save":
            return _multiples(self.save_steps, due_from, self.num_steps)
        on_the_way = _multiples(self.eval_steps, due_from, self.num_steps - 1)
        return on_the_way + (self.evaluates_at_end and due_from <= self.num_steps)


def _multiples(of: int | None, first: int, last: int) -> int:
    """Count the multiples of ``of`` from ``first`` to ``last``."""
    return 0 if of is None else max(0, last // of - (first - 1) // of)
