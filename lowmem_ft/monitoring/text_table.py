"""Tables of plain text, 80 columns wide, that a log file or a terminal shows alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowmem_ft.foundation.units import format_bytes

WIDTH = 80


def text_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of at most 80 columns: the first column takes what the others leave, and is cut in its middle.

    Args:
        headings: of the columns; all but the first hold numbers, and are aligned to the right.
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
    """A size for people; ``-`` where nobody counts it."""
    return "-" if num_bytes is None else format_bytes(num_bytes)


def share(part: float | None) -> str:
    """A share in percent; ``-`` where there is none."""
    return "-" if part is None else f"{part:.0%}"


def _cut(text: str, width: int) -> str:
    """With its beginning and its end, which tell names of modules and phases apart."""
    if len(text) <= width:
        return text
    end = (width - 1) * 2 // 3
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"
