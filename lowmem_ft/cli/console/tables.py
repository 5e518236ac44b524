"""Tables on stdout, with whole lines even if the output is a file or a pipe."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console

from lowmem_ft.reports.text.responsive_table import ResponsiveTable
from lowmem_ft.reports.text.wrapping import filled

PIPE_COLUMNS = 200
"""Columns of a file or a pipe, enough for every table: rich would take 80 where it finds no terminal."""


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Sequence[str],
    spare: Sequence[str],
) -> None:
    """Print a table.

    Args:
        columns: the headings.
        rows: the cells, one for each column.
        left: the columns that hold words; the others hold numbers and are aligned to the right.
        spare: columns that a narrow terminal leaves out, the first ones first.
    """
    width = None if Console().is_terminal else PIPE_COLUMNS
    Console(width=width, markup=False, highlight=False).print(
        ResponsiveTable(columns, rows, left=left, spare=spare)
    )


def print_row(columns: Sequence[str], cells: Sequence[str]) -> None:
    """Print one row of such a table by itself, a line for each column that is not empty."""
    widest = max(map(len, columns))
    for column, cell in zip(columns, cells, strict=True):
        if cell:
            print(f"{column:<{widest}}  {cell}")


def print_filled(text: str, *, indent: str = "") -> None:
    """Print a text whose further lines are indented four columns more; in a file or a pipe, on one line."""
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else sys.maxsize
    print("\n".join(filled(text, width, indent=indent, hanging=f"{indent}    ")))
