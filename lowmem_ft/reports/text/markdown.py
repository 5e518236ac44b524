"""Pages of Markdown on a terminal: prose is filled to its width, and a table that finds no room becomes a list."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from lowmem_ft.reports.text.wrapping import filled

_COMMENT = re.compile(r"^<!--.*?-->\n+", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r" *(?:[-*] |\d+\. )?")
_BLOCK = re.compile(
    r"^ *```(?:.|\n)*?^ *```$"  # code
    r"|^\|.*(?:\n\|.*)*"  # a table
    r"|^#.*$|^$"
    r"|^.+(?:\n(?! *(?:[-*] |\d+\. |[#|]|```|$)).+)*",  # a paragraph, or an entry of a list
    re.MULTILINE,
)


class Markdown:
    """A page: in a pipe or a file as it is written, on a terminal in its width. Code keeps its lines.

    Args:
        text: the page.
    """

    def __init__(self, text: str) -> None:
        self._text = _COMMENT.sub("", text).rstrip()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("\n".join(_lines(self._text, options.max_width)) if console.is_terminal else self._text)


def _lines(text: str, width: int) -> Iterator[str]:
    for block in _BLOCK.findall(text):
        if block.lstrip().startswith("```"):
            yield block
        elif block.startswith("|"):
            yield from _rows(block.splitlines(), width)
        else:
            marker = _MARKER.match(block)[0]  # pyright: ignore[reportOptionalSubscript] - it may be empty
            yield from filled(
                " ".join(block[len(marker) :].split()), width, indent=marker, hanging=" " * len(marker)
            ) or [""]


def _rows(lines: list[str], width: int) -> Iterator[str]:
    """Yield the lines of a table, or each row as an entry of a list with its other cells below the first."""
    if max(map(len, lines)) <= width:
        yield from lines
        return
    (_, *labels), _, *rows = (map(_cell, re.split(r"(?<!\\)\|", line)[1:-1]) for line in lines)
    for first, *others in rows:
        yield from filled(first, width, indent="- ", hanging="  ")
        pairs = zip(labels, others, strict=True)
        yield from filled(
            "; ".join(f"{column}: {cell}" for column, cell in pairs if cell), width, indent="  "
        )


def _cell(text: str) -> str:
    return html.unescape(text.replace("\\|", "|")).strip()
