"""A table that cuts no cell: if its columns do not fit side by side, it leaves out the least important."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from lowmem_ft.reports.text.prose import Prose

GAPS = (2, 1)
"""Blanks between two columns: the first number that fits."""


class ResponsiveTable:
    """Rows under headings, for a rich console of any width.

    Args:
        columns: the headings; they need not be unique.
        rows: the cells, one for each column.
        left: headings of columns of words; the others hold numbers, aligned to the right.
        wraps: the heading of a column whose words may wrap onto a second line, and its minimum width.
        spare: headings of columns that may be left out, the first ones first; a line below the table names them.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str | Text]],
        *,
        left: Sequence[str],
        wraps: tuple[str, int] = ("", 0),
        spare: Sequence[str] = (),
    ) -> None:
        self._columns = tuple(columns)
        self._rows = [tuple(row) for row in rows]
        self._left = left
        self._wraps = wraps
        self._spare = spare

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left_out, gap = self._choice(options.max_width)
        table = Table(box=None, padding=(0, max(1, gap), 0, 0), pad_edge=False, header_style="bold")
        kept = [index for index, heading in enumerate(self._columns) if heading not in left_out]
        for index in kept:
            heading = self._columns[index]
            may_wrap = heading == self._wraps[0] or (not gap and index > 0)
            table.add_column(
                heading,
                justify="left" if heading in self._left else "right",
                no_wrap=not may_wrap,
                overflow="fold",
                min_width=self._wraps[1] if gap and may_wrap else None,
            )
        for row in self._rows:
            table.add_row(*(row[index] for index in kept))
        yield table
        if left_out:
            yield Prose(
                f"\nNot shown in {options.max_width} columns: {', '.join(left_out)}. A wider terminal shows them, and "
                "--json has them."
            )

    def _choice(self, width: int) -> tuple[Sequence[str], int]:
        """Return the columns to leave out, and the blanks between the others; 0 if all except the first are folded."""
        widths = [self._width(index) for index in range(len(self._columns))]
        for num_left_out in range(len(self._spare) + 1):
            left_out = self._spare[:num_left_out]
            kept = [
                size for heading, size in zip(self._columns, widths, strict=True) if heading not in left_out
            ]
            for gap in GAPS:
                if sum(kept) + gap * (len(kept) - 1) <= width:
                    return left_out, gap
        return self._spare, 0

    def _width(self, index: int) -> int:
        heading, narrowest = self._columns[index], self._wraps[1]
        cells = (
            [narrowest]
            if heading == self._wraps[0]
            else [Text.assemble(row[index]).cell_len for row in self._rows]
        )
        return max(cell_len(heading), *cells, 0)
