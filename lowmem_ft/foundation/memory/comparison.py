"""A run's estimate next to its measurement, as plain values that are stored in its folder and read back."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.units import format_bytes

STEP_PHASES = ("generate", "score", "forward", "backward", "optimizer_step")
"""Phases that a run measures as one: it does not reset its counters inside a step."""

COMPARED_CATEGORIES = ("parameter", "optimizer_state")
"""Categories that do not change between two steps, so that they can be counted."""


@dataclass(frozen=True, kw_only=True)
class Peaks:
    """Peaks of a run, estimated or measured, in bytes of its device; on a CPU that is the whole process.

    Args:
        peak_bytes: bytes allocated on CUDA, held by the process on a CPU.
        host_peak_bytes: host memory that the process holds.
        reserved_bytes: bytes that the caching allocator reserves; None on a CPU.
        by_phase: peak bytes by phase, ``load``, ``step``, ``evaluation`` and ``save``, as far as they are known.
        by_category: bytes of tensors that stay, by use.
        step_seconds: seconds of one optimizer step; None: not known.
    """

    peak_bytes: int
    host_peak_bytes: int
    reserved_bytes: int | None
    by_phase: Mapping[str, int]
    by_category: Mapping[str, int]
    step_seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Return plain values by these names."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Peaks:
        """Make peaks from the values of :meth:`to_json`.

        Raises:
            TypeError: if names are missing or unknown, or values are not numbers.
        """
        peaks = cls(**values)
        numbers = (peaks.peak_bytes, peaks.host_peak_bytes, peaks.reserved_bytes, peaks.step_seconds)
        for number in (*numbers, *{**peaks.by_phase, **peaks.by_category}.values()):
            if not isinstance(number, (int, float, type(None))):
                raise TypeError(f"{number!r} is not a number")
        return peaks


def peaks_in(records: Iterable[Mapping[str, Any]]) -> tuple[Peaks | None, Peaks | None]:
    """Return the last estimate and measurement in the lines of a run's metrics, each None if it was not written.

    The estimate is the one that the measured process had made: a run may resume with other settings, and be killed
    before it measures anything.

    Raises:
        TypeError: if their values are not those of :class:`Peaks`.
    """
    newest: Mapping[str, Any] | None = None
    pair: tuple[Mapping[str, Any] | None, Mapping[str, Any]] | None = None
    for record in records:
        if "estimated" in record:
            newest = record["estimated"]
        if "measured" in record:
            pair = newest, record["measured"]
    estimated, measured = pair or (newest, None)
    return (
        None if estimated is None else Peaks.from_json(estimated),
        None if measured is None else Peaks.from_json(measured),
    )


def estimated_peaks(estimate: MemoryEstimate) -> Peaks:
    """Return an estimate in the terms in which a run is measured."""
    is_on_cpu = estimate.is_of_cpu
    process, heap = (estimate.host_by_part_at_peak.get(part, 0) * is_on_cpu for part in ("process", "heap"))
    phases = {
        name: size + process + (heap if name in STEP_PHASES else 0)  # the others begin with the heap trimmed
        for name, size in estimate.by_phase.items()
        if size
    }
    steps = [size for name, size in phases.items() if name in STEP_PHASES]
    by_phase = {name: size for name, size in phases.items() if name not in STEP_PHASES}
    if steps:
        by_phase["step"] = max(steps)
    return Peaks(
        peak_bytes=estimate.process_peak_bytes if is_on_cpu else estimate.allocated_peak_bytes,
        host_peak_bytes=estimate.host_peak_bytes,
        reserved_bytes=None if is_on_cpu else estimate.reserved_peak_bytes,
        by_phase=by_phase,
        by_category={
            name: size for name, size in estimate.by_category_at_peak.items() if name in COMPARED_CATEGORIES
        },
        step_seconds=estimate.step.seconds if estimate.step else None,
    )


@dataclass(frozen=True, kw_only=True)
class Row:
    """One quantity, estimated and measured; None: not known.

    Args:
        name: its name for people.
        estimated: bytes, or seconds.
        measured: the measurement in the same unit.
        is_part: whether it belongs to one phase or one use.
        is_time: whether the values are seconds.
    """

    name: str
    estimated: float | None
    measured: float | None
    is_part: bool = False
    is_time: bool = False

    @property
    def error(self) -> float | None:
        """Error of the estimate, as a share of the measurement; above 0: it was too high."""
        if self.estimated is None or not self.measured:
            return None
        return self.estimated / self.measured - 1

    def text(self, value: float | None) -> str:
        """Format a value for people."""
        if value is None:
            return "-"
        return f"{value:.3g} s" if self.is_time else format_bytes(round(value))

    def __str__(self) -> str:
        error = "" if self.error is None else f" ({self.error:+.1%})"
        return (
            f"{self.name}: estimated {self.text(self.estimated)}, measured {self.text(self.measured)}{error}"
        )


def compared(estimated: Peaks | None, measured: Peaks | None) -> Iterator[Row]:
    """Yield a row for each quantity that either of the two knows, from the whole to its parts."""

    def row(name: str, key: str, *, is_time: bool = False) -> Row:
        values = [None if peaks is None else getattr(peaks, key) for peaks in (estimated, measured)]
        return Row(name=name, estimated=values[0], measured=values[1], is_time=is_time)

    known = [peaks for peaks in (estimated, measured) if peaks is not None]
    on_gpu = any(peaks.reserved_bytes is not None for peaks in known)
    yield row("peak of tensors" if on_gpu else "peak of the process", "peak_bytes")
    if on_gpu:
        yield row("reserved by the allocator", "reserved_bytes")
        yield row("host memory", "host_peak_bytes")
    for part, names in (("by_phase", PHASE_NAMES), ("by_category", CATEGORY_NAMES)):
        for name, words in names.items():
            values = [
                None if peaks is None else getattr(peaks, part).get(name) for peaks in (estimated, measured)
            ]
            if any(value is not None for value in values):
                yield Row(name=words, estimated=values[0], measured=values[1], is_part=True)
    if any(peaks.step_seconds is not None for peaks in known):
        yield row("seconds a step", "step_seconds", is_time=True)


PHASE_NAMES = {
    "load": "while loading",
    "step": "in a step",
    "evaluation": "in evaluation",
    "save": "while saving",
}
CATEGORY_NAMES = {"parameter": "weights", "optimizer_state": "optimizer state"}


def typical_seconds(seconds: Sequence[float]) -> float | None:
    """Return the typical seconds of a warm step: the median without the first; None for fewer than two."""
    return statistics.median(seconds[1:]) if len(seconds) > 1 else None
