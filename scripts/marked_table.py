"""Replacement of a table in a page, between two marks, by a script."""

from __future__ import annotations

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
