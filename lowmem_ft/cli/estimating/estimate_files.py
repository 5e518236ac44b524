"""Pictures that ``lowmem-ft estimate`` writes into files."""

from __future__ import annotations

import argparse

from lowmem_ft.cli.console.output import writing
from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.memory.snapshot import write_snapshot
from lowmem_ft.reports.plots.memory_plot import write_plot


def write_pictures(estimate: MemoryEstimate, options: argparse.Namespace, config: AllocatorConfig) -> None:
    """Write the plot and the allocator's snapshot, if the user asked for them.

    Args:
        estimate: the estimate to show.
        options: --plot and --snapshot.
        config: the allocator's settings.
    """
    if options.plot is not None:
        with writing("plot", options.plot) as path:
            write_plot(path, estimate)
    if options.snapshot is not None:
        with writing("snapshot", options.snapshot) as path:
            write_snapshot(path, estimate.timeline, config)
