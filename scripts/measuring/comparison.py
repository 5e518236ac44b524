"""Estimates against measurements: the size of the error, and its sign."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.planning.estimator.device_target import CPU

METRICS = ("allocated", "reserved", "process")


def measured_gpu(row: Mapping[str, Any]) -> Gpu | str:
    """Return the GPU that a row was measured on, with what its driver reported; :data:`CPU` if it was a CPU."""
    gpu = row["gpu"]
    if gpu is None:
        return CPU
    numbers = {name: gpu[name] for name in ("memory_bytes", "num_multiprocessors", "segments_grow")}
    return dataclasses.replace(
        find_gpu(gpu["name"]), compute_capability=tuple(gpu["compute_capability"]), **numbers
    )


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One number, measured and estimated.

    Args:
        row: the run.
        metric: ``allocated``, ``reserved`` or ``process``.
        phase: phase of the allocated peak; ``run`` for the peak of all.
        measured_bytes: the machine's number.
        estimated_bytes: the estimator's number.
    """

    row: str
    metric: str
    phase: str
    measured_bytes: int
    estimated_bytes: int

    @property
    def error(self) -> float:
        """Relative error; negative if the estimate is too low."""
        return self.estimated_bytes / self.measured_bytes - 1


def estimated_peaks(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return the numbers of an estimate that a measurement has too."""
    return {
        "allocated": dict(estimate.by_phase),
        "reserved_peak": estimate.reserved_peak_bytes,
        "process_peak": estimate.process_peak_bytes,
    }


def compare(row: str, measured: Mapping[str, Any], estimated: Mapping[str, Any]) -> Iterator[Comparison]:
    """Yield every number that both have; reserved and process only if there is a caching allocator.

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
        count: number of comparisons.
        median: median of their absolute values.
        worst: the largest absolute value.
        under: error of the lowest estimate below its measurement, as a positive share; 0 if no estimate is below.
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
    """Summarize the errors of at least one comparison in a few numbers."""
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
    """Yield a line for each metric that was measured."""
    known = list(comparisons)
    for metric in METRICS:
        of_metric = [comparison for comparison in known if comparison.metric == metric]
        if of_metric:
            yield f"{metric:10s}{summarize(of_metric)}"
