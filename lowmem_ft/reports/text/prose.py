"""Words on a rich console, broken between words alone: rich knows of no command that should stay on one line."""

from __future__ import annotations

from collections.abc import Iterable

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.highlighter import Highlighter
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

from lowmem_ft.reports.text.wrapping import filled, longest_word

INDENT = 2
GAP = 2
MOST_LEFT = 40
"""Columns of what stands to the left, if its longest word needs no more."""


class Prose:
    """A text that is filled to the console's width.

    Args:
        text: of one line or several.
        style: of all of it, as rich names styles.
        highlighter: gives numbers and the like styles of their own; None: they get none.
    """

    def __init__(self, text: str, style: str | Style = "", highlighter: Highlighter | None = None) -> None:
        self._text = text
        self._style = style
        self._highlighter = highlighter

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = Text("\n".join(filled(self._text, options.max_width)), self._style, overflow="fold")
        if self._highlighter is not None:
            self._highlighter.highlight(text)
        yield text


class Pairs:
    """Words beside words, a pair a row; below each other where a word would not find room beside the others.

    Args:
        rows: left and right.
    """

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self.rows = tuple(rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width - INDENT
        left, right = (max(longest_word(row[side], width) for row in self.rows) for side in (0, 1))
        widest = max(cell_len(row[0]) for row in self.rows)
        left = max(left, min(widest, MOST_LEFT, width - GAP - right))
        beside = left + GAP + right <= width
        table = Table.grid(padding=(0, GAP, 0, 0))
        if beside:
            table.add_column(width=left)
            table.add_column(width=width - GAP - left)
        for one, other in self.rows:
            if beside:
                table.add_row(Prose(one), Prose(other))
            else:
                table.add_row(Prose(one))
                table.add_row(Padding(Prose(other), (0, 0, 0, INDENT)))
        yield Padding(table, (0, 0, 0, INDENT))
