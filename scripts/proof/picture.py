"""Predicted against measured, as an SVG that follows the reader's light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SIDE, LEFT, TOP, GAP = 280, 62, 92, 74
WIDTH, HEIGHT = LEFT + 2 * SIDE + GAP + 14, TOP + SIDE + 62

STYLE = """
text { font: 19px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 18px } .frame { fill: none; stroke: #8c959f } .grid { stroke: #d0d7de }
.ideal { stroke: #8c959f; stroke-dasharray: 5 5 }
.ours { fill: #0969da } .rule { fill: none; stroke: #bc4c00; stroke-width: 1.3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .frame { stroke: #6e7681 } .grid { stroke: #30363d }
.ours { fill: #58a6ff } .rule { stroke: #f0883e } }
"""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A square with one number on both logarithmic axes.

    Args:
        title: what is compared, with its unit.
        ours: measured and predicted, of each run.
        rules: the same by other people's rules.
        ticks: numbers on both axes, in rising order; the first and the last are the ends.
    """

    title: str
    ours: Sequence[tuple[float, float]]
    rules: Sequence[tuple[float, float]]
    ticks: Sequence[float]

    def place(self, value: float) -> float:
        """Return the distance of a number from the axis's start; one beyond an end is drawn at that end."""
        low, high = math.log(self.ticks[0]), math.log(self.ticks[-1])
        return SIDE * min(1.0, max(0.0, (math.log(value) - low) / (high - low)))


def proof_svg(memory: Panel, seconds: Panel) -> str:
    """Return the picture: memory on the left, seconds on the right."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Predicted against measured: memory and seconds of a step</title>",
        f"<style>{STYLE}</style>",
        '<circle class="ours" cx="16" cy="20" r="6"/><text x="30" y="26">lowmem_ft</text>',
        '<rect class="rule" x="152" y="14" width="11" height="11"/>',
        '<text x="172" y="26">rules that people use</text>',
        *_panel(memory, LEFT),
        *_panel(seconds, LEFT + SIDE + GAP),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, left: int) -> Iterable[str]:
    bottom = TOP + SIDE
    yield f'<text x="{left}" y="{TOP - 14}">{panel.title}</text>'
    for tick in panel.ticks:
        at = panel.place(tick)
        yield f'<line class="grid" x1="{left + at:.1f}" x2="{left + at:.1f}" y1="{TOP}" y2="{bottom}"/>'
        yield f'<line class="grid" x1="{left}" x2="{left + SIDE}" y1="{bottom - at:.1f}" y2="{bottom - at:.1f}"/>'
        middle = f'x="{left + at:.1f}" y="{bottom + 22}" text-anchor="middle"'
        yield f'<text class="small" {middle}>{tick:g}</text>'
        yield f'<text class="small" x="{left - 7}" y="{bottom - at + 6:.1f}" text-anchor="end">{tick:g}</text>'
    yield f'<rect class="frame" x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}"/>'
    yield f'<line class="ideal" x1="{left}" y1="{bottom}" x2="{left + SIDE}" y2="{TOP}"/>'
    for measured, predicted in panel.rules:
        x, y = left + panel.place(measured), bottom - panel.place(predicted)
        yield f'<rect class="rule" x="{x - 3.5:.1f}" y="{y - 3.5:.1f}" width="7" height="7"/>'
    for measured, predicted in panel.ours:
        x, y = left + panel.place(measured), bottom - panel.place(predicted)
        yield f'<circle class="ours" cx="{x:.1f}" cy="{y:.1f}" r="3.4"/>'
    yield f'<text class="small" x="{left + SIDE / 2}" y="{bottom + 48}" text-anchor="middle">measured</text>'
    # The other axis: "predicted" is said above the upper end, where it stays level.
    yield f'<text class="small" x="{left + SIDE}" y="{TOP - 14}" text-anchor="end">predicted</text>'
