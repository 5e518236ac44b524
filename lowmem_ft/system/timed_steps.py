"""Steps that runs on this machine's processor took, kept in the user's cache folder: its speed, for later estimates."""

from __future__ import annotations

import json
import logging
import os
import platform
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.user_paths import kept_folder
from lowmem_ft.system.cores import usable_cores

logger = logging.getLogger(__name__)

FILE_NAME = "timed_steps.json"

MOST_KEPT = 32
"""The most steps in the file; the oldest go first."""

MOST_BYTES = 2**20
"""A file of more was not written here, and is not read."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A step that a run on a processor took.

    Args:
        processor: the processor, as :func:`this_processor` names it.
        dtype: type of the operands of most products.
        reference_seconds: seconds that the traced step takes on the processor of ``memory/cpu_seconds.py``.
        seconds: seconds that a step of as many tokens took.
        threads: threads that computed it.
        model: name of the model.
        date: the day, as ``2026-11-27``.
    """

    processor: str
    dtype: str
    reference_seconds: float
    seconds: float
    threads: int
    model: str
    date: str

    def __post_init__(self) -> None:
        if not (0 < self.reference_seconds < float("inf") and 0 < self.seconds < float("inf")):
            raise ValueError(f"seconds are above 0, got {self.reference_seconds} and {self.seconds}")


def this_processor() -> str:
    """Name this machine's processor and the cores that this process may use: what a step was timed on is compared."""
    return f"{_model_name()}, {usable_cores()} cores"


def timed_steps() -> list[TimedStep]:
    """Return the steps that were timed on this processor, the oldest first; none where nothing is kept."""
    here = this_processor()
    return [step for step in _read(_file()) if step.processor == here]


def keep_timed_step(step: TimedStep) -> None:
    """Keep a step; it replaces one of the same work. Where the file cannot be written, a line in the log says so."""
    file = _file()
    if file is None:
        return

    def work(one: TimedStep) -> tuple[str, str, str]:
        return one.processor, one.dtype, f"{one.reference_seconds:.4g}"

    kept = [one for one in _read(file) if work(one) != work(step)]
    try:
        _write(file, [*kept, step][-MOST_KEPT:])
    except OSError as error:
        logger.info("The seconds of a step are not kept in %s: %s.", file, error)


def _file() -> Path | None:
    folder = kept_folder()
    return None if folder is None else folder / FILE_NAME


def _read(file: Path | None) -> list[TimedStep]:
    if file is None or not file.is_file():
        return []
    try:
        with file.open("rb") as stream:
            rows = json.loads(stream.read(MOST_BYTES))
        return [TimedStep(**_fields(row)) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        logger.info("The timed steps in %s cannot be read, and are not used: %s.", file, error)
        return []


def _fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a row, each as its type; a damaged file raises ValueError or TypeError."""
    kinds = {"reference_seconds": float, "seconds": float, "threads": int}
    return {name: kinds.get(name, str)(value) for name, value in dict(row).items()}


def _write(file: Path, steps: Iterable[TimedStep]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            json.dump([asdict(step) for step in steps], stream, indent=1)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


def _model_name() -> str:
    """Return the processor's name as the system has it; its architecture where the system names none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return next(filter(None, names), "") or platform.processor() or platform.machine()
