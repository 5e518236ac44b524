"""Tables in pages between two marks: replaced by a script, read by another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

END = "<!-- end of the table -->\n"


def with_table(page: str, script: str, table: str) -> str:
    """Replace the table of a page.

    Args:
        page: Markdown with the marks.
        script: the script's file name, which is part of the first mark.
        table: its lines.

    Returns:
        The page with the new table.
    """
    begin = f"<!-- written by scripts/{script} -->\n"
    before, mark, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    assert mark, f"the page has no line {begin}"
    assert end, f"the page has no line {END}"
    return f"{before}{begin}{table}{END}{after}"


def put_table(page: Path, script: str, table: str) -> None:
    """Replace the table of a page on disk, as :func:`with_table` does."""
    page.write_text(with_table(page.read_text(encoding="utf-8"), script, table), encoding="utf-8")


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Collection[int] = ()) -> str:
    """Return a table in Markdown.

    Args:
        heads: of the columns.
        rows: the cells of each row.
        numbers: places of columns that are aligned on the right.
    """
    rule = "|".join("---:" if place in numbers else "---" for place in range(len(heads)))
    return "\n".join([f"| {' | '.join(heads)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)])


def cells_of(page: str, script: str) -> list[list[str]]:
    """Return the cells of a table's rows, without its head.

    Args:
        page: Markdown with the marks.
        script: the script's file name, which is part of the first mark.
    """
    _, mark, rest = page.partition(f"<!-- written by scripts/{script} -->\n")
    assert mark, f"the page has no table by scripts/{script}"
    lines = [line for line in rest.partition(END)[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
