"""Text on a rich console, broken only between words: rich does not know which commands should stay on one line."""

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
"""Columns of the left-hand text, if its longest word needs no more."""


class Prose:
    """A text filled to the console's width.

    Args:
        text: one line or several.
        style: style of the whole text, as rich names styles.
        highlighter: styles numbers and the like; None: no such styles.
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
    """Pairs of texts side by side, one pair a row; one below the other if their longest words do not fit side by side.

    Args:
        rows: left and right text of each row.
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
