"""The figure of memory as a part of a page: drawn for two widths, with its values under the pointer and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.reports.plots.figure import MemoryFigure
from lowmem_ft.reports.plots.html_page import table
from lowmem_ft.reports.plots.memory_svg import memory_svg
from lowmem_ft.reports.plots.svg import within_page

__all__ = ["memory_html"]

NARROW, WIDE = 390, 960
"""Widths of the two drawings: that of a phone, and that of a page."""


def memory_html(figure: MemoryFigure) -> str:
    """Return a figure as HTML, for a page of :func:`lowmem_ft.reports.plots.html_page.page`.

    Args:
        figure: the figure.

    Returns:
        Elements; they load nothing, and texts of the figure are escaped.
    """
    drawings = "\n".join(
        f'<div class="{style}">{within_page(memory_svg(figure, width))}</div>'
        for style, width in (("narrow", NARROW), ("wide", WIDE))
    )
    data = json.dumps(_data(figure), separators=(",", ":")).replace("<", "\\u003c")
    words = [layer.words for layer in figure.layers]
    rows = table(("part", "process", *words, "where"), _rows(figure), ("part", "where"))
    return (
        f'<div class="figure" tabindex="0">\n{drawings}\n'
        '<p class="readout soft" aria-live="polite">Point at the plot, or use the arrow keys on it.</p>\n'
        f'<script type="application/json">{data}</script>\n</div>\n'
        f"<details><summary>The highest moment of each part, as a table</summary>\n{rows}\n</details>"
    )


def _data(figure: MemoryFigure) -> dict[str, object]:
    """Return what the page's script shows."""
    places = list(dict.fromkeys(figure.places))
    return {
        "moments": [float(f"{at:.6g}") for at in figure.moments],
        "end": figure.end,
        "unit": "s" if figure.axis == "seconds" else "",
        "peak": figure.peak or 0,
        "places": [", ".join(place) for place in places],
        "place": [places.index(place) for place in figure.places],
        "layers": [{"words": layer.words, "bytes": list(layer.sizes_bytes)} for layer in figure.layers],
    }


def _rows(figure: MemoryFigure) -> Iterator[tuple[str, ...]]:
    totals = figure.totals_bytes
    tensors = [
        sum(layer.sizes_bytes[index] for layer in figure.layers if layer.use != "cached")
        for index in range(len(totals))
    ]
    for phase in dict.fromkeys(phase for phase, _ in figure.places):
        of_phase = [index for index, (of_index, _) in enumerate(figure.places) if of_index == phase]
        highest = max(of_phase, key=tensors.__getitem__)
        sizes = (totals[highest], *(layer.sizes_bytes[highest] for layer in figure.layers))
        yield phase, *map(format_bytes, sizes), figure.places[highest][1]
    for part in figure.parts:
        yield part.words, *map(format_bytes, (part.total_bytes, *part.sizes_bytes)), ""
