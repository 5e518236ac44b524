"""Estimates beside measurements: how far off, and on which side."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_ft.memory.memory_estimate import MemoryEstimate

METRICS = ("allocated", "reserved", "process")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number, measured and estimated.

    Args:
        row: which run.
        metric: ``allocated``, ``reserved`` or ``process``.
        phase: of the allocated peak; ``run`` for the peak of all.
        measured_bytes: by the machine.
        estimated_bytes: by the estimator.
    """

    row: str
    metric: str
    phase: str
    measured_bytes: int
    estimated_bytes: int

    @property
    def error(self) -> float:
        """Relative error; negative where the estimate is too low."""
        return self.estimated_bytes / self.measured_bytes - 1


def estimated_peaks(estimate: MemoryEstimate) -> dict[str, Any]:
    """The numbers of an estimate that a measurement has too."""
    return {
        "allocated": dict(estimate.by_phase),
        "reserved_peak": estimate.reserved_peak_bytes,
        "process_peak": estimate.process_peak_bytes,
    }


def compare(row: str, measured: Mapping[str, Any], estimated: Mapping[str, Any]) -> Iterator[Comparison]:
    """Every number that both have; reserved and process only where there is a caching allocator.

    Raises:
        KeyError: if the estimate lacks a phase that was measured.
    """
    pairs = [
        ("allocated", phase, num_bytes, estimated["allocated"][phase])
        for phase, num_bytes in measured["allocated"].items()
    ]
    pairs.append(
        ("allocated", "run", max(measured["allocated"].values()), max(estimated["allocated"].values()))
    )
    if measured["reserved"]:
        pairs.append(("reserved", "run", max(measured["reserved"].values()), estimated["reserved_peak"]))
        pairs.append(("process", "run", measured["process"], estimated["process_peak"]))
    for metric, phase, measured_bytes, estimated_bytes in pairs:
        yield Comparison(
            row=row,
            metric=metric,
            phase=phase,
            measured_bytes=measured_bytes,
            estimated_bytes=estimated_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class ErrorSummary:
    """Relative errors of many comparisons.

    Args:
        count: how many.
        median: of their absolute values.
        worst: the largest absolute value.
        under: how far the lowest estimate lies below what was measured; 0 if none does.
        worst_of: the run and phase of the worst.
    """

    count: int
    median: float
    worst: float
    under: float
    worst_of: str

    def __str__(self) -> str:
        return (
            f"{self.count:4d} numbers: median {self.median:.3%}, worst {self.worst:.3%} ({self.worst_of}), "
            f"at most {self.under:.3%} under"
        )


def summarize(comparisons: Iterable[Comparison]) -> ErrorSummary:
    """The errors of at least one comparison in a few numbers."""
    known = list(comparisons)
    worst = max(known, key=lambda comparison: abs(comparison.error))
    return ErrorSummary(
        count=len(known),
        median=statistics.median(abs(comparison.error) for comparison in known),
        worst=abs(worst.error),
        under=max(0.0, -min(comparison.error for comparison in known)),
        worst_of=f"{worst.row}, {worst.phase}",
    )


def table(comparisons: Iterable[Comparison]) -> Iterator[str]:
    """A line for each metric that was measured."""
    known = list(comparisons)
    for metric in METRICS:
        of_metric = [comparison for comparison in known if comparison.metric == metric]
        if of_metric:
            yield f"{metric:10s}{summarize(of_metric)}"
