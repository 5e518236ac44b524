"""The figure of an estimate: a step of the run in its steady state by the GPU's clock, as the allocator holds it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import chain, groupby, takewhile

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.memory.playback import StepClock
from lowmem_ft.foundation.system.garbage_collector import collector_paused
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.reports.estimate_words import (
    CATEGORY_WORDS,
    HOST_PART_WORDS,
    PHASE_WORDS,
    budget_below_device,
    context_words,
    from_to,
    module_words,
    short_name,
    verdict,
)
from lowmem_ft.reports.plots.figure import Band, Layer, Limit, MemoryFigure, Part, Use
from lowmem_ft.reports.plots.memory_moments import STACKED, Moment, moments_of, thinned

__all__ = ["memory_figure"]

MOST_STRETCHES = 600
"""Stretches of the axis that are drawn apart: more than a screen shows."""


@collector_paused()
def memory_figure(estimate: MemoryEstimate) -> MemoryFigure:
    """Return the figure of an estimate.

    The step is the one that repeats, with the cache that the allocator has by then. Without a clock, as on a CPU, the
    axis counts the events of the whole timeline.

    Args:
        estimate: an estimate with its timeline.

    Returns:
        The figure; its highest point is ``estimate.process_peak_bytes``.

    Raises:
        UserError: if the timeline has no allocations, as where only numbers were kept of an estimate.
    """
    memory = _Memory(estimate)
    if not memory.moments:
        raise UserError("A plot needs an estimate with its timeline, got one without allocations.")
    clock = _clock(estimate)
    if clock is None:
        step = [moment._replace(at=moment.position - 1) for moment in memory.moments]
        others, micro_batches, end = {}, [], step[-1].at + 1
    else:
        step, others = _in_step(memory.moments, clock), _by_part(memory.moments, clock)
        micro_batches = list(_micro_batches(clock))
        end = clock.step_seconds + clock.untraced * clock.untraced_seconds
    step = thinned(step, MOST_STRETCHES)
    highest = max(chain(step, *others.values()), key=lambda moment: moment.total_bytes)
    stacks = [memory.stack(moment) for moment in step]
    of_parts = {words: memory.highest_stack(moments) for words, moments in others.items()}
    shown = [index for index in range(len(USES)) if any(row[index] for row in (*stacks, *of_parts.values()))]
    return MemoryFigure(
        title=short_name(estimate.model.name),
        summary=verdict(estimate),
        axis="events" if clock is None else "seconds",
        axis_words=_axis_words(estimate),
        moments=[moment.at for moment in step],
        end=end,
        layers=[
            Layer(
                use=USES[index],
                words=_use_words(estimate, USES[index]),
                sizes_bytes=[stack[index] for stack in stacks],
            )
            for index in shown
        ],
        places=[(PHASE_WORDS[moment.phase], module_words(moment.module)) for moment in step],
        phases=list(_phases(step, end)),
        micro_batches=micro_batches,
        limits=list(_limits(estimate)),
        process=Limit(words=_process_words(estimate), size_bytes=estimate.process_peak_bytes),
        peak=next((index for index, moment in enumerate(step) if moment is highest), None),
        peak_words=f"{PHASE_WORDS[highest.phase]}, {module_words(highest.module)}",
        at_peak_bytes=[memory.stack(highest)[index] for index in shown],
        parts=[
            Part(words=words, sizes_bytes=[stack[index] for index in shown])
            for words, stack in of_parts.items()
        ],
    )


USES: tuple[Use, ...] = ("context", *STACKED, "cached")
"""The layers from the bottom of the stack to its top."""


class _Memory:
    """A process's memory after each event: its tensors, and what the allocator and the driver hold around them.

    Args:
        estimate: the estimate.
    """

    def __init__(self, estimate: MemoryEstimate) -> None:
        self._context_bytes = estimate.process_peak_bytes - estimate.reserved_peak_bytes
        self._cached_bytes = estimate.reserved_peak_bytes - estimate.allocated_peak_bytes
        self._most_reserved_bytes = estimate.reserved_peak_bytes
        played = estimate.playback
        self._reserved_bytes = None if played is None else played.reserved_bytes
        self.moments = list(moments_of(estimate.timeline, None if played is None else played.block_bytes))

    def stack(self, moment: Moment) -> tuple[int, ...]:
        """Return the bytes of each of ``USES`` at a moment."""
        cached_bytes = max(0, self._reserved_at(moment) - moment.total_bytes)
        return (self._context_bytes, *moment.stacked_bytes, cached_bytes)

    def highest_stack(self, moments: Sequence[Moment]) -> tuple[int, ...]:
        """Return the stack where tensors take most, with the most that the allocator holds in any of the moments."""
        highest = max(moments, key=lambda moment: moment.total_bytes)
        reserved_bytes = max(map(self._reserved_at, moments))
        return (*self.stack(highest)[:-1], max(0, reserved_bytes - highest.total_bytes))

    def _reserved_at(self, moment: Moment) -> int:
        if self._reserved_bytes is None:
            return moment.total_bytes + self._cached_bytes
        # Where it would hold more than there is, it empties its cache.
        return min(self._reserved_bytes[moment.position - 1], self._most_reserved_bytes)


def _clock(estimate: MemoryEstimate) -> StepClock | None:
    return None if estimate.playback is None else estimate.playback.step


def _in_step(moments: Sequence[Moment], clock: StepClock) -> list[Moment]:
    """Return the moments of the step with their seconds, those of micro-batches that were not traced among them."""
    first, last = clock.events
    before = [moment for moment in moments if moment.position <= first]
    step = [
        moment._replace(at=_seconds(clock, moment.position - 1))
        for moment in moments
        if first < moment.position <= last
    ]
    if before:
        step.insert(0, before[-1]._replace(at=0.0))
        # Until the step allocates, the latest allocation is one of the step before.
        begun = next((one.phase for one in step if one.phase != before[-1].phase), before[-1].phase)
        old = list(takewhile(lambda one: one.phase != begun, step))
        step[: len(old)] = [one._replace(phase=begun) for one in old]
    return _with_untraced(_with_rounds(step, clock), clock)


def _seconds(clock: StepClock, num_events: int) -> float:
    """Return when the GPU reaches the moment after so many events."""
    return float(clock.seconds[max(0, clock.positions.searchsorted(num_events, "right") - 1)])


def _with_rounds(step: list[Moment], clock: StepClock) -> list[Moment]:
    """Let each round that represents several last as long as these do, at its highest.

    Its events have the seconds of its last repetition.
    """
    positions = [moment.position for moment in step]
    added = []
    for begin, end in clock.repeated:
        of_round = step[bisect_right(positions, begin) : bisect_right(positions, end)]
        if of_round:
            highest = max(of_round, key=lambda moment: moment.total_bytes)
            added.append(highest._replace(at=_seconds(clock, begin)))
    return sorted((*step, *added), key=lambda moment: moment.at)


def _with_untraced(step: list[Moment], clock: StepClock) -> list[Moment]:
    """Repeat the last micro-batch for those that were not traced."""
    if not clock.untraced or not clock.micro_batches:
        return step
    (begin, end), shift = clock.micro_batches[-1], clock.untraced * clock.untraced_seconds
    start, stop = _seconds(clock, begin), _seconds(clock, end)
    scale = clock.untraced_seconds / max(stop - start, 1e-12)
    last = thinned([one for one in step if begin < one.position <= end], MOST_STRETCHES)
    copies = [
        one._replace(at=stop + number * clock.untraced_seconds + max(0.0, one.at - start) * scale)
        for number in range(clock.untraced)
        for one in last
    ]
    before = [one for one in step if one.position <= end]
    after = [one._replace(at=one.at + shift) for one in step if one.position > end]
    return [*before, *copies, *after]


def _micro_batches(clock: StepClock) -> Iterator[Band]:
    """Yield the micro-batches of the step, if there are several."""
    traced = [(_seconds(clock, begin), _seconds(clock, end)) for begin, end in clock.micro_batches]
    if len(traced) + clock.untraced < 2:
        return
    stop, each = traced[-1][1], clock.untraced_seconds
    untraced = [(stop + number * each, stop + (number + 1) * each) for number in range(clock.untraced)]
    for number, (start, end) in enumerate((*traced, *untraced), start=1):
        yield Band(words=f"{number}", start=start, end=end)


def _by_part(moments: Sequence[Moment], clock: StepClock) -> dict[str, list[Moment]]:
    """Return the moments outside the step, by the name of the part of the run."""
    first, last = clock.events
    parts: dict[str, list[Moment]] = {}
    for moment in moments:
        if moment.position <= first:
            words = PHASE_WORDS["load"] if moment.phase == "load" else "first step"
        elif moment.position > last and moment.phase in ("evaluation", "save"):
            words = PHASE_WORDS[moment.phase]
        else:
            continue
        parts.setdefault(words, []).append(moment)
    return parts


def _phases(step: Sequence[Moment], end: float) -> Iterator[Band]:
    firsts = [next(run) for _, run in groupby(step, key=lambda moment: moment.phase)]
    for first, stop in zip(firsts, [*(one.at for one in firsts[1:]), end], strict=True):
        if stop > first.at:
            yield Band(words=PHASE_WORDS[first.phase], start=first.at, end=stop, phase=first.phase)


def _limits(estimate: MemoryEstimate) -> Iterator[Limit]:
    if (memory := estimate.gpu.memory_bytes) and not estimate.is_of_cpu:
        free = memory - estimate.gpu.held_by_others_bytes
        words = f"{estimate.gpu.name} has {format_bytes(memory)}"
        if free < memory:
            words = f"{estimate.gpu.name} has {format_bytes(free)} free of {format_bytes(memory)}"
        yield Limit(words=words, size_bytes=free)
    if (budget := budget_below_device(estimate)) is not None:
        yield Limit(words=f"the budget allows {format_bytes(budget)}", size_bytes=budget)


def _process_words(estimate: MemoryEstimate) -> str:
    found = estimate.process_range
    ends = "" if found is None else f" ({from_to(found.low_bytes, found.high_bytes)})"
    return f"the process takes {format_bytes(estimate.process_peak_bytes)}{ends}"


def _axis_words(estimate: MemoryEstimate) -> str:
    if _clock(estimate) is None:
        return "allocations and frees, in order: there is no clock"
    return f"seconds of a step, by the clock of {estimate.gpu.name}"


def _use_words(estimate: MemoryEstimate, use: Use) -> str:
    if use == "cached":
        return HOST_PART_WORDS["heap"] if estimate.is_of_cpu else "cached, not in use"
    if use == "context":
        return HOST_PART_WORDS["process"] if estimate.is_of_cpu else context_words(estimate)
    return CATEGORY_WORDS[use]
