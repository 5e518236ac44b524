"""The shell of a page: one file, which loads nothing, light or dark as its reader prefers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files


def page(title: str, heading: str, body: str) -> str:
    """Return a page.

    Args:
        title: its title, for a browser's tab, as plain text.
        heading: what is above its contents, likewise.
        body: its contents, as HTML.

    Returns:
        The text of an HTML file.
    """
    here = files("lowmem_ft.reports.plots")
    style, script = (
        here.joinpath(name).read_text(encoding="utf-8") for name in ("html_page.css", "readout.js")
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"<h1>{escape(heading)}</h1>\n{body}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str]) -> str:
    """Return a table of plain texts, which are escaped.

    Args:
        headings: one for each column.
        rows: the cells, one for each column.
        words: headings of the columns that hold words; the others hold numbers.
    """
    styles = [' class="words"' if heading in words else ' class="number"' for heading in headings]
    head = "".join(f"<th{style}>{escape(one)}</th>" for one, style in zip(headings, styles, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(f"<td{style}>{escape(cell)}</td>" for cell, style in zip(row, styles, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="scrolls"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>'
    )
