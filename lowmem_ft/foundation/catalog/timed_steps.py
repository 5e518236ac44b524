"""Steps that runs took on this machine's processor, kept in the user's cache folder: its speed, for later estimates."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.catalog.kept_rows import read_rows, write_rows
from lowmem_ft.foundation.memory.cpu_step_time import TimedStep, with_seconds
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.memory.step_work import StepWork
from lowmem_ft.foundation.system.cores import processor_name, usable_cores
from lowmem_ft.foundation.user_paths import kept_folder

logger = logging.getLogger(__name__)

FILE_NAME = "timed_steps.v1.json"

MOST_KEPT = 32
"""The most steps in the file; the oldest go first."""


@dataclass(frozen=True)
class _Machine:
    """The surroundings that a step's seconds hold for; steps of others are neither used nor deleted.

    Args:
        processor: the processor's name, with the cores that the process may use.
        threads: threads that compute.
        software: versions of torch and of this package.
    """

    processor: str
    threads: int
    software: str

    @classmethod
    def here(cls, threads: int) -> _Machine:
        """Describe this one."""
        software = ", ".join(f"{name} {version(name)}" for name in ("torch", "lowmem_ft"))
        return cls(f"{processor_name()}, {usable_cores()} cores", threads, software)


def with_seconds_here(estimate: MemoryEstimate, threads: int) -> MemoryEstimate:
    """Return an estimate for this machine's processor with the time of a step, if one was timed here before.

    Args:
        estimate: an estimate of any device; that of a GPU stays as it is.
        threads: threads that compute.
    """
    if not estimate.is_of_cpu or kept_folder() is None:
        return estimate
    return with_seconds(estimate, timed_steps(threads), threads)


def timed_steps(threads: int) -> list[TimedStep]:
    """Return the steps that were timed here with as many threads, the oldest first; none where nothing is kept."""
    here = _Machine.here(threads)
    return [step for machine, step in _read(_file()) if machine == here]


def keep_timed_step(step: TimedStep, threads: int) -> None:
    """Keep a step; it replaces one of the same work. Where the file cannot be written, a line in the log says so."""
    file, here = _file(), _Machine.here(threads)
    if file is None:
        return
    kept = [(machine, one) for machine, one in _read(file) if (machine, one.work) != (here, step.work)]
    try:
        rows = [asdict(machine) | asdict(one) for machine, one in [*kept, (here, step)][-MOST_KEPT:]]
        write_rows(file, rows)
    except OSError as error:
        logger.info("The seconds of a step are not kept in %s: %s.", file, error)


def _file() -> Path | None:
    folder = kept_folder()
    return None if folder is None else folder / FILE_NAME


def _read(file: Path | None) -> list[tuple[_Machine, TimedStep]]:
    return list(_steps(read_rows(file)))


def _steps(rows: list[Any]) -> Iterator[tuple[_Machine, TimedStep]]:
    """Yield the rows that can be read."""
    for row in rows:
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            work = row["work"]
            numbers = {name: float(work[name]) for name in ("flops", "num_bytes", "num_operators")}
            step = TimedStep(
                work=StepWork(**numbers, dtype=str(work["dtype"]), tokens=int(work["tokens"])),
                tokens=float(row["tokens"]),
                seconds=float(row["seconds"]),
                model=str(row["model"]),
                date=str(row["date"]),
            )
            yield _Machine(str(row["processor"]), int(row["threads"]), str(row["software"])), step
