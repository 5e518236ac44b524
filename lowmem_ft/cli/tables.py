"""Tables on stdout, whole lines also where the output is a file or a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

PIPE_COLUMNS = 200
"""Wide enough for every table: rich would cut to 80 columns where it finds no terminal."""


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str]) -> None:
    """Print a table.

    Args:
        columns: the headings.
        rows: the cells, one for each column.
        left: the columns that hold words; the others hold numbers and are aligned to the right.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    width = None if Console().is_terminal else PIPE_COLUMNS
    Console(width=width, markup=False).print(table)
