"""Where ``lowmem-ft estimate`` writes: the console of its report, and files."""

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
    """Where the report goes: stdout, unless that is taken by JSON."""
    from rich.console import Console

    return Console(stderr=options.json == "-", highlight=False, markup=False)


def write_pictures(estimate: MemoryEstimate, options: argparse.Namespace, config: AllocatorConfig) -> None:
    """The plot and the allocator's snapshot, where they were asked for.

    Args:
        estimate: what they are of.
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
    """The values as JSON, to a file or alone on stdout, where that was asked for."""
    text = json.dumps(values, indent=2)
    if options.json == "-":
        print(text)
    elif options.json is not None:
        with writing("json", options.json) as path:
            path.write_text(f"{text}\n", encoding="utf-8")


@contextlib.contextmanager
def writing(option: str, name: str) -> Iterator[Path]:
    """A file that is being written; what stands in the way is told by the option's name."""
    try:
        yield Path(name)
    except OSError as error:
        raise UserError(f"--{option} cannot write {name}: {error.strerror}. Name another file.") from error
