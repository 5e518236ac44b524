"""The shell of a page: one file, which loads nothing, light or dark as its reader prefers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --soft: #59636e; --grid: #d1d9e0; --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9198a1; --grid: #3d444d; --paper: #0d1117; } }
* { box-sizing: border-box; }
body { margin: 1.5rem auto; max-width: 62rem; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif;
  overflow-wrap: anywhere; }
h1 { font-size: 1.3rem; line-height: 1.3; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .4rem; }
p, ul { margin: .5rem 0; }
.soft { color: var(--soft); }
.scrolls { overflow-x: auto; }
table { border-collapse: collapse; overflow-wrap: normal; }
th, td { padding: .2rem 1rem .2rem 0; text-align: left; vertical-align: top; font-weight: normal;
  border-bottom: 1px solid var(--grid); }
thead th { color: var(--soft); }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
pre { padding: .7rem; border: 1px solid var(--grid); border-radius: 6px; white-space: pre-wrap;
  font: 13px/1.45 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
summary { cursor: pointer; }
svg { display: block; max-width: 100%; height: auto; }
.wide { display: none; }
.figure svg { touch-action: pan-y; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; }
@media (min-width: 61rem) { .wide { display: block; } .narrow { display: none; } }
@media (max-width: 460px) { body { padding: 0; } h1, h2, p, ul, pre, .scrolls, details, .readout { margin-left: 10px;
  margin-right: 10px; } }
"""


def page(title: str, heading: str, body: str) -> str:
    """Return a page.

    Args:
        title: its title, for a browser's tab, as plain text.
        heading: what is above its contents, likewise.
        body: its contents, as HTML.

    Returns:
        The text of an HTML file.
    """
    script = files(__package__).joinpath("readout.js").read_text(encoding="utf-8")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(heading)}</h1>\n{body}\n<script>\n{script}</script>\n</body>\n</html>\n"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str]) -> str:
    """Return a table of plain texts, which are escaped.

    Args:
        headings: one for each column.
        rows: the cells, one for each column.
        words: headings of the columns that hold words; the others hold numbers.
    """
    styles = ["" if heading in words else ' class="number"' for heading in headings]
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
