"""Reports as documents: paragraphs, tables, labelled texts and commands, which one engine lays out.

The console decides what a document looks like. On a terminal it has colours, and fits the width. In a pipe or a file it
has no colours, and a command or a row of a table is one line, which grep finds whole, unless the environment says how
many COLUMNS there are. Everywhere lines break only between words: what may be typed or copied stays whole.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table as Grid
from rich.text import Text

from lowmem_ft.reports.text.wrapping import filled, longest_word, shell_lines

INDENT = 2
GAP = 2
GAPS = (2, 1)
"""Blanks between two columns of a table: the first number that fits."""

MOST_LEFT = 40
"""Columns of a label, if its longest word needs no more."""

LEAST_RIGHT = 16
"""Columns of the text next to a label; if there are fewer, texts go below."""


class Document:
    """Blocks below each other, with a blank line between each two.

    Args:
        blocks: texts (each a paragraph, filled to the width), tables, pairs, commands, documents, anything that rich
            prints; None and whatever has no content are left out.
        title: a bold line above the blocks.
        gap: number of blank lines between two blocks.
    """

    def __init__(self, *blocks: RenderableType | None, title: str = "", gap: int = 1) -> None:
        self.blocks = [block for block in blocks if block]
        self.title = title
        self._gap = gap

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self and self.title:
            yield _paragraph(Text(self.title, "bold"), options.max_width)
        for number, block in enumerate(self.blocks):
            if number:
                yield from ("",) * self._gap
            yield _paragraph(block, options.max_width) if isinstance(block, (str, Text)) else block


class Pairs:
    """Labels and texts side by side, one pair a row; texts go below their labels if there is no room next to them.

    A word too long for its place begins further left, on a line of its own.

    Args:
        rows: label and text of each row.
        style: style of the labels.
        indent: blanks before each row.
        gap: blanks between a label and its text.
    """

    def __init__(
        self,
        rows: Iterable[tuple[str | Text, str | Text]],
        *,
        style: str = "",
        indent: int = INDENT,
        gap: int = GAP,
    ) -> None:
        self.rows = [(Text.assemble(label, style=style), Text.assemble(text)) for label, text in rows]
        self._indent = indent
        self._gap = gap

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room = _room_of_rows(console, options)
        width = room - self._indent
        least, right = (max(longest_word(row[side].plain, width) for row in self.rows) for side in (0, 1))
        left = max(least, min(MOST_LEFT, max(label.cell_len for label, _ in self.rows)))
        if least <= width - self._gap - right:
            left = min(left, width - self._gap - right)
        is_beside = width - left - self._gap >= LEAST_RIGHT
        start = left + self._gap if is_beside else INDENT
        for label, text in self.rows:
            texts = _lines(text, width - start)
            for line in _lines(label, left if is_beside else width):
                line.pad_left(self._indent)
                if is_beside and texts and texts[0].cell_len <= width - start:
                    line.pad_right(self._indent + start - line.cell_len)
                    line.append_text(texts.pop(0))
                yield line
            for line in texts:
                line.pad_left(max(0, min(self._indent + start, room - line.cell_len)))
                yield line


class Command:
    """A command to copy, in lines that a shell joins.

    Args:
        words: its words, unquoted.
    """

    def __init__(self, *words: str) -> None:
        self.words = words

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(shell_lines(self.words, _room_of_rows(console, options))))


class Table:
    """Rows under headings, none of them cut: columns that find no room go below, or are left out.

    Args:
        columns: the headings; they need not be unique.
        rows: the cells, one for each column.
        left: headings of columns of words; the others hold numbers, aligned to the right.
        wraps: the heading of a column whose words may wrap onto a second line, and its minimum width.
        spare: headings of columns that may be left out, the first ones first; a line below the table names them.
        stacks: whether columns that find no room go below the others instead, next to the first column again.
    """

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str | Text]],
        *,
        left: Sequence[str],
        wraps: tuple[str | None, int] = (None, 0),
        spare: Sequence[str] = (),
        stacks: bool = False,
    ) -> None:
        self.columns = tuple(columns)
        self.rows = [[Text.assemble(cell) for cell in row] for row in rows]
        self.left = left
        self._wraps = wraps
        self._spare = spare
        self._stacks = stacks

    def __bool__(self) -> bool:
        return bool(self.rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        natural = [self._width(index) for index in range(len(self.columns))]
        whole = max(options.max_width, _total(natural, range(len(natural))))
        room = min(whole, _room_of_rows(console, options))
        yield from console.render(self._laid_out(natural, room), options.update(width=room))

    def _laid_out(self, natural: Sequence[int], room: int) -> Document:
        heading, narrowest = self._wraps
        widths = [
            max(cell_len(each), narrowest) if each == heading else width
            for each, width in zip(self.columns, natural, strict=True)
        ]
        if self._stacks:
            groups = self._groups(widths, room)
            return Document(
                *(self._grid(kept, GAP if _total(widths, kept) <= room else 0) for kept in groups)
            )
        left_out, gap = self._choice(widths, room)
        kept = [index for index, heading in enumerate(self.columns) if heading not in left_out]
        told = f"Not shown in {room} columns: {', '.join(left_out)}. A wider terminal shows them, and --json has them."
        return Document(self._grid(kept, gap), told if left_out else None)

    def _groups(self, widths: Sequence[int], room: int) -> list[list[int]]:
        """Return the columns of each of the tables that go below each other."""
        groups = [[0]]
        for index in range(1, len(widths)):
            if len(groups[-1]) > 1 and _total(widths, [*groups[-1], index]) > room:
                groups.append([0])
            groups[-1].append(index)
        return groups

    def _choice(self, widths: Sequence[int], room: int) -> tuple[Sequence[str], int]:
        """Return the columns to leave out, and the blanks between the others; 0 if all except the first are folded."""
        for num_left_out, gap in itertools.product(range(len(self._spare) + 1), GAPS):
            left_out = self._spare[:num_left_out]
            kept = [index for index, heading in enumerate(self.columns) if heading not in left_out]
            if _total(widths, kept, gap) <= room:
                return left_out, gap
        return self._spare, 0

    def _grid(self, kept: Sequence[int], gap: int) -> Grid:
        """Return some of the columns, so many blanks apart; if that is 0, all except the first are folded."""
        table = Grid(box=None, padding=(0, max(1, gap), 0, 0), pad_edge=False, header_style="bold")
        for index in kept:
            heading = self.columns[index]
            may_wrap = heading == self._wraps[0] or (not gap and index > 0)
            table.add_column(
                heading,
                justify="left" if heading in self.left else "right",
                no_wrap=not may_wrap,
                overflow="fold",
                min_width=self._wraps[1] if gap and may_wrap else None,
            )
        for row in self.rows:
            table.add_row(*(row[index] for index in kept))
        return table

    def _width(self, index: int) -> int:
        lines = [line for row in self.rows for line in row[index].plain.splitlines()]
        return max(map(cell_len, (self.columns[index], *lines)))


def _room_of_rows(console: Console, options: ConsoleOptions) -> int:
    """Return the columns for a row: any number in a pipe or a file, if no one says what is to fit there."""
    is_bounded = console.is_terminal or not options.no_wrap or "COLUMNS" in os.environ
    return options.max_width if is_bounded else sys.maxsize


def _total(widths: Sequence[int], kept: Sequence[int], gap: int = GAP) -> int:
    """Return what columns take side by side."""
    return sum(widths[index] for index in kept) + gap * (len(kept) - 1)


def _paragraph(text: str | Text, width: int) -> Text:
    return Text("\n").join(_lines(text, width))


def _lines(text: str | Text, width: int) -> list[Text]:
    """Return a text broken between words; its lines keep their styles."""
    whole, lines, start = Text.assemble(text), [], 0
    for line in filled(whole.plain, width):
        start = whole.plain.index(line, start)
        lines.append(whole[start : start + len(line)])
        start += len(line)
    return lines
