"""SVG as text: elements, colours for a light and a dark page, and the axes that figures share.

Text is 12 units high, so that a drawing as wide as the screen, in pixels, is readable. No font is measured: words take
the width of a common sans-serif face.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from html import escape

from lowmem_ft.foundation.memory.category import Phase
from lowmem_ft.foundation.units import GIB, KIB, MIB, TIB, format_bytes
from lowmem_ft.reports.plots.figure import Use

COLOURS: dict[Use, str] = {
    "context": "#7d8590",
    "parameter": "#0072b2",
    "optimizer_state": "#009e73",
    "gradient": "#d55e00",
    "workspace": "#8c6d46",
    "communication": "#7a5aa6",
    "input": "#f0e442",
    "activation": "#e69f00",
    "logits_and_loss": "#cc79a7",
    "temporary": "#56b4e9",
    "cached": "#d0d5db",
}
"""Colours of Okabe and Ito (2008), which colour-blind people can tell apart, and purple, brown and two greys."""

_GREYS: dict[str, str] = {"context": "var(--context)", "cached": "var(--cached)"}
"""Colours that differ on a dark page."""

LINE_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5aa6", "#8c6d46")
"""Colours of lines, in their order."""

PHASE_SHADES: dict[Phase, float] = {
    "load": 0.3,
    "generate": 0.42,
    "score": 0.18,
    "forward": 0.1,
    "backward": 0.26,
    "optimizer_step": 0.55,
    "evaluation": 0.12,
    "save": 0.3,
}
"""Darkness of each phase's band, from 0 to 1: neighbours differ."""

FONT = 12
"""Height of the letters, in units of the drawing."""
ROW = FONT + 6
LEFT, RIGHT = 62, 10
"""Room for the words of the axis on the left of a plot, and for half a word on its right."""

LETTER = 0.56 * FONT
"""Average width of a letter, in the same units."""

_NAMESPACE = "http://www.w3.org/2000/svg"

STYLE = f"""
.lmf {{ --ink: #1f2328; --soft: #59636e; --grid: #d1d9e0; --paper: #ffffff; --warn: #c1121f;
  --context: #7d8590; --cached: #d0d5db;
  font: {FONT}px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }}
@media (prefers-color-scheme: dark) {{
  .lmf {{ --ink: #e6edf3; --soft: #9198a1; --grid: #3d444d; --paper: #0d1117; --warn: #ff7b72;
    --context: #848d97; --cached: #39414a; }} }}
.lmf text {{ fill: var(--ink); }}
.lmf .soft {{ fill: var(--soft); }}
.lmf .title {{ font-weight: 600; font-size: {FONT + 2}px; }}
.lmf .head {{ font-weight: 600; }}
.lmf .halo {{ paint-order: stroke; stroke: var(--paper); stroke-width: 3px; stroke-linejoin: round; }}
.lmf .paper {{ fill: var(--paper); }}
.lmf .band {{ fill: var(--ink); }}
.lmf .grid {{ stroke: var(--grid); }}
.lmf .edge {{ stroke: var(--ink); fill: none; stroke-width: 1.5; }}
.lmf .limit {{ stroke: var(--warn); stroke-dasharray: 6 4; stroke-width: 1.5; }}
.lmf .peak {{ stroke: var(--ink); stroke-dasharray: 2 3; }}
.lmf .pointer {{ stroke: var(--ink); visibility: hidden; }}
.lmf .dot {{ fill: var(--ink); stroke: var(--paper); }}
.lmf .end {{ text-anchor: end; }}
.lmf .middle {{ text-anchor: middle; }}
.lmf .number {{ font-variant-numeric: tabular-nums; }}
.lmf .line {{ fill: none; stroke-width: 1.8; stroke-linejoin: round; }}
"""
"""Rules for every figure; a page that is dark for another reason sets these variables itself."""


def document(width: float, height: float, label: str, elements: Iterable[str]) -> str:
    """Return an SVG document, which also goes into an HTML page as it is.

    Args:
        width: units across, which are pixels where it is not scaled.
        height: units down.
        label: what it shows, for people who do not see it.
        elements: in the order in which they are painted.
    """
    body = "\n".join(elements)
    return (
        f'<svg xmlns="{_NAMESPACE}" class="lmf" viewBox="0 0 {number(width)} {number(height)}" '
        f'width="{number(width)}" height="{number(height)}" role="img" aria-label="{escape(label)}">\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="paper" width="100%" height="100%" rx="6"/>\n{body}\n</svg>\n'
    )


def within_page(document: str) -> str:
    """Return a document for an HTML page, where SVG needs no namespace declaration."""
    return document.replace(f' xmlns="{_NAMESPACE}"', "", 1)


def paint(use: Use) -> str:
    """Return the colour of a layer, as an attribute says it."""
    return _GREYS.get(use, COLOURS[use])


def number(value: float) -> str:
    """Return a coordinate with at most one digit after the decimal point."""
    return f"{value:.1f}".removesuffix(".0")


def text(x: float, y: float, words: str, style: str = "") -> str:
    """Return a line of text; its words are escaped."""
    of_class = f' class="{style}"' if style else ""
    return f'<text x="{number(x)}" y="{number(y)}"{of_class}>{escape(words)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    """Return a straight line."""
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} class="{style}"/>'


def rectangle(x: float, y: float, width: float, height: float, paint: str) -> str:
    """Return a rectangle; ``paint`` are further attributes."""
    size = f'x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"'
    return f"<rect {size} {paint}/>"


def width_of(words: str) -> float:
    """Return the approximate width of words, in units of the drawing."""
    return len(words) * LETTER


def wrapped(words: str, width: float, font: float = FONT) -> list[str]:
    """Return words in lines that fit a width; a word that is longer is broken."""
    return textwrap.wrap(words, max(8, int(width / LETTER * FONT / font))) or [""]


def ticks(top: float, most: int, *, start: float = 0.0) -> list[float]:
    """Return at most ``most`` round numbers from ``start`` to ``top``."""
    span = max(top - start, 1e-12)
    power = 10.0**-9
    while True:
        for digit in (1, 2, 5):
            step = digit * power
            first = -(-start // step)
            if span / step < most:
                return [
                    (first + index) * step for index in range(int((top - first * step) / step + 1e-9) + 1)
                ]
        power *= 10


def size_ticks(top_bytes: float, most: int) -> list[int]:
    """Return at most ``most`` round sizes, in bytes, from 0 to ``top_bytes``."""
    unit = next((unit for unit in (TIB, GIB, MIB, KIB) if unit <= top_bytes), 1)
    steps = [unit * digit * 10**power for power in range(3) for digit in (1, 2, 5)]
    step = next(step for step in steps if top_bytes < most * step)
    return list(range(0, int(top_bytes) + 1, step))


def tick_words(values: Sequence[float]) -> list[str]:
    """Return numbers as text, with as many decimals as tell neighbours apart."""
    if len(values) < 2:
        return [f"{value:g}" for value in values]
    step = values[1] - values[0]
    digits = next((digits for digits in range(10) if abs(round(step, digits) - step) < 1e-6 * step), 0)
    return [f"{value:,.{digits}f}" if digits < 6 else f"{value:.2g}" for value in values]


def size_words(size_bytes: float) -> str:
    """Return a round size without needless digits: ``20 GiB``."""
    amount, unit = format_bytes(int(size_bytes)).split()
    return f"{float(amount):g} {unit}"
