"""Output of ``lowmem-ft estimate``: the console of its report, and files."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowmem_ft.foundation.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from lowmem_ft.memory.allocator.allocator_config import AllocatorConfig
    from lowmem_ft.memory.memory_estimate import MemoryEstimate


def report_console(options: argparse.Namespace) -> Console:
    """Return the console of the report: stdout, unless JSON takes that."""
    from rich.console import Console

    return Console(stderr=options.json == "-", highlight=False, markup=False)


def write_pictures(estimate: MemoryEstimate, options: argparse.Namespace, config: AllocatorConfig) -> None:
    """Write the plot and the allocator's snapshot, if the user asked for them.

    Args:
        estimate: the estimate to show.
        options: --plot and --snapshot.
        config: the allocator's settings.
    """
    from lowmem_ft.memory.snapshot import write_snapshot
    from lowmem_ft.reports.plots.memory_plot import write_plot

    if options.plot is not None:
        with writing("plot", options.plot) as path:
            write_plot(path, estimate, config)
    if options.snapshot is not None:
        with writing("snapshot", options.snapshot) as path:
            write_snapshot(path, estimate.timeline, config)


def write_json(values: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the values as JSON, to a file or alone to stdout, if the user asked for it."""
    text = json.dumps(values, indent=2)
    if options.json == "-":
        print(text)
    elif options.json is not None:
        with writing("json", options.json) as path:
            path.write_text(f"{text}\n", encoding="utf-8")


@contextlib.contextmanager
def writing(option: str, name: str) -> Iterator[Path]:
    """Yield the path of a file to write; raise an error with the option's name if that fails."""
    try:
        yield Path(name)
    except OSError as error:
        raise UserError(f"--{option} cannot write {name}: {error.strerror}. Name another file.") from error
