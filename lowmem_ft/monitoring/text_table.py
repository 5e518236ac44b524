"""Tables of plain text, 80 columns wide, that look the same in a log file and a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowmem_ft.foundation.units import format_bytes

WIDTH = 80


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format lines of at most 80 columns: the first column takes the remaining width, and is cut in its middle.

    Args:
        headings: headings of the columns; all except the first hold numbers, and are aligned to the right.
        rows: the cells, one for each column.
    """
    lines = [tuple(headings), *(tuple(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(1, len(headings))]
    longest = max(len(line[0]) for line in lines)
    first = min(longest, WIDTH - sum(widths) - 2 * len(widths))
    return "\n".join(
        "  ".join((_cut(name, first).ljust(first), *map(str.rjust, cells, widths))).rstrip()
        for name, *cells in lines
    )


def size(num_bytes: int | None) -> str:
    """Format a size for people; ``-`` for None, a size that is not counted."""
    return "-" if num_bytes is None else format_bytes(num_bytes)


def share(part: float | None) -> str:
    """Format a share in percent; ``-`` for None."""
    return "-" if part is None else f"{part:.0%}"


def _cut(text: str, width: int) -> str:
    """Shorten a text in its middle: beginning and end distinguish names of modules and phases."""
    if len(text) <= width:
        return text
    end = (width - 1) * 2 // 3
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"
