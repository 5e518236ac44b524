"""Seconds of a step on this machine's processor, from steps that runs took on it before.

What a step asks of a processor is known from its trace; how fast a processor is, is not: it depends on its cores, their
vector units and what else runs. The first run on a machine therefore times its first steps (``training/run``), and an
estimate scales them by the work of the two steps. There is no estimate of seconds before.

The work of a step is one number: the seconds that a processor takes which computes 100 GFLOP/s, moves 10 GB/s and
calls an operator in 10 µs. Only the ratios of these three matter, as each measured step stretches or shrinks all of
them alike; ``scripts/cpu_seconds_against_runs.py`` shows what is lost by that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lowmem_ft.memory.memory_estimate import MemoryEstimate, StepTime
from lowmem_ft.memory.step_work import StepWork
from lowmem_ft.system.timed_steps import TimedStep

SAME_WORK = 0.02
"""The greatest difference of two steps' work that counts as none."""

SAME_SHARE, OTHER_SHARE = 0.15, 0.5
"""Relative distance of a run's seconds from those of the same step timed before, and from those scaled from another."""


NO_SECONDS_OF_CPU = (
    "time on a CPU, until a run on this machine has timed a step (training.max_steps=2 is enough)"
)
"""The part that an estimate for a processor leaves out for as long as no step was timed on it."""


def with_seconds_here(estimate: MemoryEstimate, timed: Sequence[TimedStep]) -> MemoryEstimate:
    """Return an estimate for this machine's processor with the time of a step.

    Args:
        estimate: an estimate of any device.
        timed: steps that runs took on this processor.

    Returns:
        The estimate with :attr:`MemoryEstimate.step`, and with a line about the step that its seconds come from. It is
        unchanged for a GPU, for several processes, which share the cores, and where no step of the same type was timed.
    """
    work = estimate.cpu_work
    alike = [step for step in reversed(timed) if work is not None and step.dtype == work.dtype]
    if work is None or not alike or estimate.processes is not None:
        return estimate
    nearest = min(alike, key=lambda step: abs(math.log(_ratio(work, step))))
    return dataclasses.replace(
        estimate,
        step=_step_like(work, nearest),
        choices=(*estimate.choices, _in_words(nearest)),
        not_modelled=tuple(text for text in estimate.not_modelled if text != NO_SECONDS_OF_CPU),
    )


def _step_like(work: StepWork, timed: TimedStep) -> StepTime:
    ratio, by_bound = _ratio(work, timed), work.seconds_by_bound
    return StepTime(
        seconds=timed.seconds * ratio,
        tokens=work.tokens,
        bound_by=max(by_bound, key=by_bound.__getitem__),
        seconds_share=SAME_SHARE if abs(ratio - 1) <= SAME_WORK else OTHER_SHARE,
    )


def _ratio(work: StepWork, timed: TimedStep) -> float:
    return work.reference_seconds / timed.reference_seconds


def _in_words(timed: TimedStep) -> str:
    threads = f"{timed.threads} thread{'s' * (timed.threads > 1)}"
    return (
        f"seconds: by work, from a step of {timed.model} that took {timed.seconds:.3g} s on this processor "
        f"({threads}, {timed.dtype}, {timed.date})"
    )
