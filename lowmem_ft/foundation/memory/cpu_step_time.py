"""Seconds of a step on a processor, from steps that runs took on it before.

What a step asks of a processor is known from its trace; how fast a processor is, is not: it depends on its cores, their
vector units and what else runs. The first steps of a run tell it (``training/run/run_memory.py``), and an estimate
scales the one whose work is most alike by the work of the two. Before that, there are no seconds.

The work of a step becomes one number: the seconds that a processor takes which computes 100 GFLOP/s, moves 10 GB/s and
calls an operator in 10 µs. Only the ratios of these three matter, as each timed step stretches or shrinks all of them
alike; ``scripts/calibrate cpu_seconds`` shows what is lost by that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate, StepTime
from lowmem_ft.foundation.memory.step_work import StepWork

SAME_SHARE, OTHER_SHARE = 0.25, 0.6
"""Relative distance of a run's seconds from those of the same step timed before, and from those scaled from another.

Each holds 7 of the 8 settings of ``scripts/calibrate cpu_seconds`` (AMD EPYC, 2 cores, torch 2.13.0, 2026-11-27):
repetitions differ by 11% (median) and 43%, the nearest other setting by 22% and 59%.
"""

NO_SECONDS = "time on a CPU"
"""The part that an estimate for a processor leaves out, unless a step was timed on it."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A step that a run took on a processor.

    Args:
        work: the work of the step that was estimated, with rows of the longest length.
        tokens: tokens of the timed steps, padding included; fewer than those of ``work`` if rows were shorter.
        seconds: seconds of a step, scaled by tokens to those of ``work``.
        model: name of the model.
        date: the day, as ``2026-11-27``.
    """

    work: StepWork
    tokens: float
    seconds: float
    model: str
    date: str

    def __post_init__(self) -> None:
        if not (0 < self.seconds < float("inf") and 0 < self.tokens < float("inf")):
            raise ValueError(
                f"a timed step has seconds and tokens above 0, got {self.seconds} and {self.tokens}"
            )


def with_seconds(estimate: MemoryEstimate, timed: Sequence[TimedStep], threads: int) -> MemoryEstimate:
    """Return an estimate for a processor with the time of a step.

    Args:
        estimate: an estimate of one process on the processor.
        timed: steps that were timed on it with as many threads, the oldest first.
        threads: threads that compute.

    Returns:
        The estimate with :attr:`MemoryEstimate.step`, and with a line about the step that its seconds come from. Where
        no step of the same type was timed, it says how to get one.
    """
    work = estimate.cpu_work
    if work is None or estimate.processes is not None:  # several processes share the cores
        return estimate
    alike = [step for step in reversed(timed) if step.work.dtype == work.dtype]
    if not alike:
        return _with_words(estimate, f"{NO_SECONDS}: {_none_yet(work, threads)}")
    nearest = min(alike, key=lambda step: abs(math.log(_ratio(work, step))))
    estimate = _with_words(estimate, None)
    return dataclasses.replace(
        estimate,
        step=_step_like(work, nearest),
        choices=(*estimate.choices, _in_words(nearest, threads)),
    )


def _with_words(estimate: MemoryEstimate, words: str | None) -> MemoryEstimate:
    """Return the estimate with other words about the seconds that it lacks; None: none."""
    others = tuple(text for text in estimate.not_modelled if text != NO_SECONDS)
    return dataclasses.replace(estimate, not_modelled=others if words is None else (words, *others))


def _none_yet(work: StepWork, threads: int) -> str:
    return (
        f"no run on this machine has timed a step in {work.dtype} with {_counted(threads)} yet "
        "(training.max_steps=2 is enough)"
    )


def _step_like(work: StepWork, timed: TimedStep) -> StepTime:
    is_same = work.is_like(timed.work) and timed.tokens >= _WHOLE * timed.work.tokens
    by_bound = work.seconds_by_bound
    return StepTime(
        seconds=timed.seconds * _ratio(work, timed),
        tokens=work.tokens,
        bound_by=max(by_bound, key=by_bound.__getitem__),
        seconds_share=SAME_SHARE if is_same else OTHER_SHARE,
    )


_WHOLE = 0.9
"""The least share of a step's tokens that a timed one has to have had: the optimizer's part does not grow with them."""


def _ratio(work: StepWork, timed: TimedStep) -> float:
    return work.reference_seconds / timed.work.reference_seconds


def _in_words(timed: TimedStep, threads: int) -> str:
    return (
        f"seconds: by work, from a step of {timed.model} that took {timed.seconds:.3g} s on this processor "
        f"({_counted(threads)}, {timed.work.dtype}, {timed.date})"
    )


def _counted(threads: int) -> str:
    return f"{threads} thread{'s' * (threads > 1)}"
