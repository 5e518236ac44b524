"""Lines over the steps of a run as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowmem_ft.reports.plots.figure import LineFigure
from lowmem_ft.reports.plots.svg import (
    FONT,
    LEFT,
    LINE_COLOURS,
    RIGHT,
    ROW,
    document,
    line,
    number,
    rectangle,
    size_ticks,
    size_words,
    text,
    tick_words,
    ticks,
    width_of,
    wrapped,
)

__all__ = ["line_svg"]

HEIGHT = 190
"""Height of the plot itself."""

MOST_POINTS = 600
"""Most points that a line is drawn with; a longer line keeps the minimum and maximum of each stretch."""


def line_svg(figure: LineFigure, width: int = 420) -> str:
    """Draw lines over a common axis.

    Args:
        figure: the figure.
        width: units across; text is 12 of them high.

    Returns:
        An SVG document of its own, light or dark as its reader prefers; it loads nothing.
    """
    return _Drawing(figure, width).document()


class _Drawing:
    """The figure's elements, in the order in which they are painted."""

    def __init__(self, figure: LineFigure, width: int) -> None:
        self._figure, self._width = figure, width
        self._right = width - RIGHT
        self._title = wrapped(figure.title, width - 2 * RIGHT, FONT + 2)
        self._legend = list(_rows_of_legend([one.words for one in figure.lines], width - 2 * RIGHT))
        self._top = 16 + ROW * (len(self._title) + len(self._legend)) + 10
        self._bottom = self._top + HEIGHT
        points = [point for one in figure.lines for point in one.points]
        self._start, self._end = min(x for x, _ in points), max(x for x, _ in points)
        ordinates = [y for _, y in points]
        low, high = min(ordinates), max(ordinates)
        near = [limit.size_bytes for limit in figure.limits if limit.size_bytes <= 2 * high]
        high = max(high, *near, low)
        margin = 0.08 * (high - low) or abs(high) * 0.05 or 1.0
        self._low = 0.0 if figure.starts_at_zero or figure.unit == "bytes" else low - margin
        self._high = high + (2 * margin if near else margin)

    def document(self) -> str:
        """Return the drawing."""
        elements = [*self._headings(), *self._axes(), *self._lines(), *self._limits()]
        names = ", ".join(one.words for one in self._figure.lines)
        return document(self._width, self._bottom + 2 * ROW + 8, f"{self._figure.title}: {names}", elements)

    def _x(self, value: float) -> float:
        span = self._end - self._start or 1.0
        return LEFT + (value - self._start) / span * (self._right - LEFT)

    def _y(self, value: float) -> float:
        return self._bottom - (value - self._low) / (self._high - self._low) * HEIGHT

    def _headings(self) -> Iterator[str]:
        y = 10.0
        for words in self._title:
            y += ROW
            yield text(RIGHT, y - 4, words, "head")
        place = 0
        for row in self._legend:
            x, y = float(RIGHT), y + ROW
            for words in row:
                colour = LINE_COLOURS[place % len(LINE_COLOURS)]
                yield rectangle(x, y - 11, 14, 4, f'rx="2" fill="{colour}"')
                yield text(x + 20, y - 4, words)
                x, place = x + _width_in_legend(words), place + 1

    def _axes(self) -> Iterator[str]:
        figure = self._figure
        if figure.unit == "bytes":
            values = size_ticks(self._high, 6)
            words = [size_words(value) if value else "0" for value in values]
        else:
            values = ticks(self._high, 6, start=self._low)
            words = tick_words(values)
        for value, label in zip(values, words, strict=True):
            yield line(LEFT, self._y(value), self._right, self._y(value), "grid")
            yield text(LEFT - 6, self._y(value) + 4, label, "end soft number")
        steps = [value for value in ticks(self._end, 6, start=self._start) if value == int(value)]
        for value, label in zip(steps, tick_words(steps), strict=True):
            yield text(self._x(value), self._bottom + FONT + 4, label, "middle soft number")
        yield text(self._right, self._bottom + 2 * FONT + 7, figure.axis_words, "end soft")

    def _lines(self) -> Iterator[str]:
        for place, one in enumerate(self._figure.lines):
            colour = LINE_COLOURS[place % len(LINE_COLOURS)]
            points = [(self._x(x), self._y(y)) for x, y in _thinned(one.points)]
            path = " ".join(f"{number(x)},{number(y)}" for x, y in points)
            yield f'<polyline points="{path}" class="line" stroke="{colour}"/>'
            for x, y in points if one.shows_points or len(points) == 1 else ():
                yield f'<circle cx="{number(x)}" cy="{number(y)}" r="3" fill="{colour}"/>'

    def _limits(self) -> Iterator[str]:
        for limit in self._figure.limits:
            if limit.size_bytes < self._high:
                y = self._y(limit.size_bytes)
                yield line(LEFT, y, self._right, y, "limit")
                yield text(LEFT + 4, y - 5, limit.words, "halo")
            else:
                yield text(LEFT + 4, self._top + FONT, f"↑ {limit.words}", "halo")


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    if len(points) <= MOST_POINTS:
        return points
    stretch = -(-2 * len(points) // MOST_POINTS)
    kept = [points[0], points[-1]]
    for first in range(0, len(points), stretch):
        part = points[first : first + stretch]
        kept += [min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])]
    return sorted(set(kept))


def _width_in_legend(words: str) -> float:
    return 20 + width_of(words) + 14


def _rows_of_legend(names: Sequence[str], width: float) -> Iterator[list[str]]:
    """Yield the names of each row of the legend; a single line needs none."""
    row: list[str] = []
    for words in names if len(names) > 1 else ():
        if row and sum(map(_width_in_legend, (*row, words))) > width:
            yield row
            row = []
        row.append(words)
    if row:
        yield row
