"""A page whose table a script writes, between two marks."""

from __future__ import annotations

END = "<!-- end of the table -->\n"


def with_table(page: str, script: str, table: str) -> str:
    """A page with a table in place of the one that it has.

    Args:
        page: Markdown with the marks.
        script: by whose name the first mark goes.
        table: its lines.

    Returns:
        The page.
    """
    begin = f"<!-- written by scripts/{script} -->\n"
    before, mark, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    assert mark, f"the page has no line {begin}"
    assert end, f"the page has no line {END}"
    return f"{before}{begin}{table}{END}{after}"
