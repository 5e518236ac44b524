"""The findings of a leak hunt, for people and for programs."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.monitoring.text_table import WIDTH

Kind = Literal["leak", "cycle", "once"]

_HEADINGS: dict[Kind, str] = {
    "leak": "Leaks: more after each step, and something holds it",
    "cycle": "Reference cycles: objects that only hold each other, until Python's collector runs",
    "once": "Grew once: not leaks but caches and the like",
}


@dataclass(frozen=True, kw_only=True)
class Growth:
    """Tensors made at one place in the program whose number has grown.

    Attributes:
        kind: ``leak`` has grown with the steps, ``once`` in one of them; ``cycle`` is garbage that each step leaves.
        site: file, line and function that make them.
        dtype: their type.
        device: their device.
        shapes: some of their shapes.
        bytes_per_step: growth per step, on average; for ``once``: the whole growth.
        count_per_step: growth in number of storages.
        holder: the path to one of them from a variable; empty if none was found.
    """

    kind: Kind
    site: str
    dtype: str
    device: str
    shapes: tuple[tuple[int, ...], ...]
    bytes_per_step: int
    count_per_step: float
    holder: str = ""


@dataclass(frozen=True)
class LeakReport:
    """Growth of memory between corresponding moments of some steps.

    Attributes:
        steps: number of steps compared.
        growths: the largest first.
        fragmentation_bytes_per_step: growth of the allocator's reserved memory per step while its tensors do not grow.
    """

    steps: int
    growths: tuple[Growth, ...]
    fragmentation_bytes_per_step: int = 0

    def of_kind(self, kind: Kind) -> tuple[Growth, ...]:
        """Return the growths of one kind, the largest first."""
        return tuple(growth for growth in self.growths if growth.kind == kind)

    @property
    def leaks(self) -> tuple[Growth, ...]:
        """Growths that would fill the memory if the program ran on."""
        return self.of_kind("leak")

    def table(self, max_rows: int = 10) -> str:
        """Return the report in words, 80 columns wide.

        Args:
            max_rows: number of growths of each kind to show.
        """
        lines = [line for kind in _HEADINGS for line in self._lines_of(kind, max_rows)]
        if self.fragmentation_bytes_per_step:
            lines += textwrap.wrap(
                f"Fragmentation: the allocator reserves {format_bytes(self.fragmentation_bytes_per_step)} more a step, "
                "and tensors do not. PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True helps most.",
                WIDTH,
            )
        return "\n".join(lines) if lines else f"Nothing grew in {self.steps} steps."

    def to_json(self) -> str:
        """Return everything as JSON, in bytes."""
        return json.dumps(dataclasses.asdict(self), indent=2)

    def _lines_of(self, kind: Kind, max_rows: int) -> Iterator[str]:
        growths = self.of_kind(kind)
        if not growths:
            return
        each = "" if kind == "once" else " a step"
        total = format_bytes(sum(growth.bytes_per_step for growth in growths))
        yield from textwrap.wrap(f"{_HEADINGS[kind]} ({total}{each}).", WIDTH)
        for growth in growths[:max_rows]:
            shapes = " ".join(str(list(shape)) for shape in growth.shapes)
            what = (
                f"{format_bytes(growth.bytes_per_step)}{each}: {growth.count_per_step:g} x {shapes} {growth.dtype} on "
                f"{growth.device}, made at {growth.site}"
            )
            yield from textwrap.wrap(what, WIDTH, initial_indent="  ", subsequent_indent="    ")
            if growth.holder:
                held = f"held by {growth.holder}"
                yield from textwrap.wrap(held, WIDTH, initial_indent="    ", subsequent_indent="      ")
        if len(growths) > max_rows:
            yield f"  ({len(growths) - max_rows} more)"
