"""Compare the clock's seconds of collectives with public timings, by size and number of GPUs.

    python scripts/clock_collectives.py

The rows are ``tests/data/measured/collectives-public.json``, to none of which a number is fitted. The table goes into
``docs/clock.md``.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import marked_table
from clock_against_public import PAGE, ROWS
from command_line import parser_of

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.units import MIB, format_bytes
from lowmem_ft.virtual_gpu.replay.timing.links import SECONDS_PER_COLLECTIVE, link_between

COLLECTIVES = ROWS.with_name("collectives-public.json")

LARGE_BYTES = 64 * MIB
"""Bytes from which on the link decides; below :data:`SMALL_BYTES` it is the seconds that any collective takes."""
SMALL_BYTES = MIB

_PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """A collective that was timed.

    Args:
        gpu: a name of the catalogue.
        collective: its name as in a trace.
        devices: GPUs that take part, in one machine.
        bytes: of the whole tensor, which each GPU has before or after it.
        bytes_per_second: these bytes over the time.
    """

    gpu: str
    collective: str
    devices: int
    bytes: int
    bytes_per_second: int

    @property
    def seconds(self) -> float:
        """The measured time."""
        return self.bytes / self.bytes_per_second

    @property
    def predicted_seconds(self) -> float:
        """The clock's time, of a ring over the slowest link."""
        sent = _PASSES[self.collective] * self.bytes * (self.devices - 1) / self.devices
        return sent / link_between(find_gpu(self.gpu)).bytes_per_second + SECONDS_PER_COLLECTIVE

    @property
    def error(self) -> float:
        """Predicted over measured seconds, less one."""
        return self.predicted_seconds / self.seconds - 1


def load_rows() -> list[CollectiveRow]:
    """Return all rows."""
    return [CollectiveRow(**row) for row in json.loads(COLLECTIVES.read_text(encoding="utf-8"))["rows"]]


def table(rows: list[CollectiveRow]) -> str:
    """Return each row's predicted and measured time, after the medians by number of GPUs."""
    heads = "GPU", "GPUs", "rows", "median error", "worst"
    sizes = (
        (f"below {format_bytes(SMALL_BYTES)}", lambda row: row.bytes < SMALL_BYTES),
        ("between", lambda row: SMALL_BYTES <= row.bytes < LARGE_BYTES),
        (f"from {format_bytes(LARGE_BYTES)} on", lambda row: row.bytes >= LARGE_BYTES),
    )
    medians = [
        (f"{gpu}, {name}", f"{devices}", *_errors_of(chosen))
        for gpu in sorted({row.gpu for row in rows})
        for name, is_of_size in sizes
        for devices in sorted({row.devices for row in rows})
        if (chosen := [row for row in rows if row.gpu == gpu and row.devices == devices and is_of_size(row)])
    ]
    first = marked_table.table_of(heads, medians, numbers=(1, 2, 3, 4))
    heads = "GPU", "collective", "GPUs", "bytes", "predicted", "measured", "error"
    return f"{first}\n\n{marked_table.table_of(heads, _cells(rows), numbers=(2, 3, 4, 5, 6))}\n"


def _errors_of(rows: list[CollectiveRow]) -> tuple[str, str, str]:
    errors = [row.error for row in rows]
    return f"{len(rows)}", f"{statistics.median(errors):+.0%}", f"{max(errors, key=abs):+.0%}"


def _cells(rows: list[CollectiveRow]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        times = (f"{1e6 * seconds:,.0f} us" for seconds in (row.predicted_seconds, row.seconds))
        name = row.collective.replace("_", "-")
        yield row.gpu, name, f"{row.devices}", format_bytes(row.bytes), *times, f"{row.error:+.0%}"


def main() -> int:
    """Write the page, and print the table."""
    parser_of(__doc__).parse_args()
    written = table(load_rows())
    marked_table.put_table(PAGE, Path(__file__).name, written)
    print(written)
    return 0


if __name__ == "__main__":
    sys.exit(main())
