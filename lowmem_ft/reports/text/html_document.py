"""Documents as HTML, for a browser that lays them out itself: no widths, no columns that are left out."""

from __future__ import annotations

import io
import itertools
import shlex
from collections.abc import Iterator
from html import escape

from rich.console import Console, RenderableType
from rich.text import Text

from lowmem_ft.reports.text.document import Command, Document, Pairs, Table

_COLUMNS = 80
"""Columns for what only rich can lay out."""


def html_of(block: RenderableType) -> str:
    """Return a block of a report as HTML, its texts escaped.

    Args:
        block: a document, or anything that may be a block of one. What is no block of ours is laid out by rich, as on a
            terminal of 80 columns without colours.
    """
    return "".join(_parts(block))


def text_html(text: str | Text) -> str:
    """Return a text with its styles as classes: ``bold``, ``dim`` and the names of colours; line breaks stay."""
    return "".join(_spans(Text.assemble(text)))


def copied_html(text: str) -> str:
    """Return a command or the lines of a file, with a button that copies them."""
    code = escape(text)
    return f'<div class="copied"><pre><code>{code}</code></pre><button type="button">copy</button></div>'


def _parts(block: RenderableType) -> Iterator[str]:
    if isinstance(block, (str, Text)):
        yield f"<p>{text_html(block)}</p>"
    elif isinstance(block, Document):
        if block and block.title:
            yield f"<h4>{escape(block.title)}</h4>"
        for inner in block.blocks:
            yield from _parts(inner)
    elif isinstance(block, Pairs):
        yield '<dl class="pairs">'
        yield from (f"<dt>{text_html(label)}</dt><dd>{text_html(text)}</dd>" for label, text in block.rows)
        yield "</dl>"
    elif isinstance(block, Command):
        yield copied_html(shlex.join(block.words))
    elif isinstance(block, Table):
        yield from _table(block)
    else:
        console = Console(file=io.StringIO(), width=_COLUMNS, color_system=None, record=True)
        console.print(block)
        yield f"<pre>{escape(console.export_text())}</pre>"


def _table(table: Table) -> Iterator[str]:
    classes = ["" if heading in table.left else ' class="number"' for heading in table.columns]
    heads = (f"<th{each}>{escape(name)}</th>" for name, each in zip(table.columns, classes, strict=True))
    yield f'<div class="wide"><table><thead><tr>{"".join(heads)}</tr></thead><tbody>'
    for row in table.rows:
        cells = (f"<td{each}>{text_html(cell)}</td>" for cell, each in zip(row, classes, strict=True))
        yield f"<tr>{''.join(cells)}</tr>"
    yield "</tbody></table></div>"


def _spans(text: Text) -> Iterator[str]:
    """Yield the text in pieces of one style each."""
    ends = {0, len(text.plain), *(end for span in text.spans for end in (span.start, span.end))}
    for start, end in itertools.pairwise(sorted(ends)):
        styles = [text.style, *(span.style for span in text.spans if span.start <= start and end <= span.end)]
        names = " ".join(dict.fromkeys(word for style in styles for word in str(style).split()))
        words = escape(text.plain[start:end]).replace("\n", "<br>")
        yield f'<span class="{escape(names)}">{words}</span>' if names else words
