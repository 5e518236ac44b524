"""The figure of memory as SVG: the stack over a step, its limits, values at the peak, and the rest of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowmem_ft.foundation.memory.category import Phase
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.reports.estimate_words import PHASE_WORDS
from lowmem_ft.reports.plots.figure import Band, MemoryFigure
from lowmem_ft.reports.plots.svg import (
    FONT,
    LEFT,
    PHASE_SHADES,
    RIGHT,
    ROW,
    document,
    line,
    number,
    paint,
    rectangle,
    size_ticks,
    size_words,
    text,
    tick_words,
    ticks,
    width_of,
    wrapped,
)

__all__ = ["memory_svg"]

NARROWEST = 320
WIDE = 720
"""Width from which the legend is next to the plot, and not below it."""

LEGEND = 270
STRIP = FONT + 5
"""Height of the strip of phases, and of that of micro-batches."""


def memory_svg(figure: MemoryFigure, width: int = 420) -> str:
    """Draw a figure of memory.

    Args:
        figure: the figure.
        width: units across, at least 320; text is 12 of them high, so that it is readable where as many pixels show it.

    Returns:
        An SVG document of its own, light or dark as its reader prefers; it loads nothing, and also goes into an HTML
        page as it is.
    """
    return _Drawing(figure, max(width, NARROWEST)).document()


class _Drawing:
    """The figure's elements, in the order in which they are painted."""

    def __init__(self, figure: MemoryFigure, width: int) -> None:
        self._figure, self._width = figure, width
        self._is_wide = width >= WIDE
        self._right = width - RIGHT - (LEGEND if self._is_wide else 0)
        self._title = wrapped(figure.title, width - 2 * RIGHT, FONT + 2)
        self._summary = wrapped(figure.summary, width - 2 * RIGHT)
        self._axis_words = wrapped(figure.axis_words, self._right - RIGHT)
        strips = 2 if figure.micro_batches else 1
        self._strips_top = 12 + ROW * (len(self._title) + len(self._summary)) + 4
        self._plot_top = self._strips_top + strips * STRIP
        self._plot_bottom = self._plot_top + (340 if self._is_wide else 230)
        highest = max(figure.highest_bytes, figure.process.size_bytes)
        near = [limit.size_bytes for limit in figure.limits if limit.size_bytes <= 2 * highest]
        room = 2.2 * ROW / (self._plot_bottom - self._plot_top)
        self._top_bytes = max(1.0, max(highest, *near, 0) / (1 - room))

    def document(self) -> str:
        """Return the drawing."""
        bottom, below = self._below()
        elements = [*self._headings(), *self._strips(), *self._plot(), *below]
        label = f"{self._figure.title}. {self._figure.summary}. {self._figure.process.words}."
        return document(self._width, bottom + 8, label, elements)

    def _x(self, at: float) -> float:
        return LEFT + at / self._figure.end * (self._right - LEFT)

    def _y(self, size_bytes: float) -> float:
        return self._plot_bottom - size_bytes / self._top_bytes * (self._plot_bottom - self._plot_top)

    def _headings(self) -> Iterator[str]:
        y = 12.0
        for style, lines in (("title", self._title), ("soft", self._summary)):
            for words in lines:
                y += ROW
                yield text(RIGHT, y - 4, words, style)

    def _strips(self) -> Iterator[str]:
        yield from self._strip(self._figure.phases, self._strips_top)
        if batches := self._figure.micro_batches:
            top = self._strips_top + STRIP
            yield from self._strip(batches, top)
            if not self._fits(batches[0]):
                words = f"{len(batches)} micro-batches"
                middle = (self._x(batches[0].start) + self._x(batches[-1].end)) / 2
                yield text(middle, top + FONT, words, "middle halo")

    def _fits(self, band: Band) -> bool:
        return width_of(band.words) + 4 < self._x(band.end) - self._x(band.start)

    def _strip(self, bands: Sequence[Band], top: float) -> Iterator[str]:
        for index, band in enumerate(bands):
            start, end = self._x(band.start), self._x(band.end)
            shade = (0.06, 0.14)[index % 2] if band.phase is None else PHASE_SHADES[band.phase]
            yield rectangle(start, top, end - start, STRIP - 1, f'class="band" opacity="{shade}"')
            if self._fits(band):
                yield text((start + end) / 2, top + FONT, band.words, "middle")

    def _plot(self) -> Iterator[str]:
        figure = self._figure
        for tick in size_ticks(self._top_bytes, 7):
            y = self._y(tick)
            yield line(LEFT, y, self._right, y, "grid")
            yield text(LEFT - 6, y + 4, size_words(tick) if tick else "0", "end soft number")
        yield f'<g class="plot" data-left="{number(LEFT)}" data-right="{number(self._right)}">'
        yield from self._layers()
        yield line(LEFT, self._plot_top, LEFT, self._plot_bottom, "pointer")
        yield "</g>"
        if figure.peak is not None:
            x = self._x(figure.moments[figure.peak])
            tensors = sum(
                size
                for size, layer in zip(figure.at_peak_bytes, figure.layers, strict=True)
                if layer.use != "cached"
            )
            yield line(x, self._plot_top, x, self._plot_bottom, "peak")
            yield f'<circle cx="{number(x)}" cy="{number(self._y(tensors))}" r="4" class="dot"/>'
        yield from self._lines_across()
        yield from self._axis()

    def _layers(self) -> Iterator[str]:
        """Yield areas from the highest to the lowest: each covers the lower part of the one before."""
        heights = self._figure.totals_bytes
        for layer in reversed(self._figure.layers):
            yield f'<path d="{self._path(heights)}" fill="{paint(layer.use)}"/>'
            heights = [height - size for height, size in zip(heights, layer.sizes_bytes, strict=True)]

    def _path(self, heights: Sequence[float]) -> str:
        base = number(self._plot_bottom)
        parts, before = [f"M{number(self._x(self._figure.moments[0]))} {base}"], base
        for at, height in zip(self._figure.moments, heights, strict=True):
            if (y := number(self._y(height))) != before:
                parts.append(f"H{number(self._x(at))}V{y}")
                before = y
        return "".join([*parts, f"H{number(self._x(self._figure.end))}V{base}Z"])

    def _lines_across(self) -> Iterator[str]:
        """Yield the process's figure and the limits, each with its words where they do not meet others'."""
        process = self._figure.process
        drawn = [(process.size_bytes, process.words, "edge")]
        beyond = []
        for limit in self._figure.limits:
            if limit.size_bytes < self._top_bytes:
                drawn.append((limit.size_bytes, limit.words, "limit"))
            else:
                beyond.append(limit.words)
        above = self._plot_top + (len(beyond)) * ROW
        for place, words in enumerate(beyond):
            yield text(LEFT + 4, self._plot_top + FONT + place * ROW, f"↑ {words}", "halo")
        for size, words, style in sorted(drawn, reverse=True):
            y = self._y(size)
            yield line(LEFT, y, self._right, y, style)
            baseline = y - 5 if y - 5 - FONT >= above else max(y, above) + FONT + 3
            yield text(LEFT + 4, baseline, words, "halo")
            above = max(baseline, y) + 3

    def _axis(self) -> Iterator[str]:
        figure = self._figure
        y = self._plot_bottom
        yield line(LEFT, y, self._right, y, "grid")
        if figure.axis == "seconds":
            values = ticks(figure.end, 8 if self._is_wide else 5)
            for value, words in zip(values, tick_words(values), strict=True):
                yield text(self._x(value), y + FONT + 4, words, "middle soft number")
        for row, words in enumerate(self._axis_words, start=1):
            yield text(self._right, y + 4 + FONT + row * (FONT + 3), words, "end soft")

    def _below(self) -> tuple[float, list[str]]:
        """Return the lowest line, and what is below the plot or next to it."""
        under_axis = self._plot_bottom + FONT + 10 + len(self._axis_words) * (FONT + 3)
        left, y = (self._right + 24, self._strips_top) if self._is_wide else (RIGHT, under_axis)
        y, elements = self._legend(left, self._width - RIGHT, y)
        if self._is_wide:
            y, further = self._rest(RIGHT, self._right, max(under_axis, 0))
            legend_end, elements = self._legend(left, self._width - RIGHT, self._strips_top)
            return max(y, legend_end), [*elements, *further]
        y, further = self._rest(left, self._width - RIGHT, y + 4)
        return y, [*elements, *further]

    def _legend(self, left: float, right: float, y: float) -> tuple[float, list[str]]:
        figure, elements = self._figure, []
        at = ""
        if figure.peak is not None and figure.axis == "seconds":
            at = f" at {figure.moments[figure.peak]:.3g} s"
        for words in wrapped(f"At the peak of tensors{at}: {figure.peak_words}", right - left):
            y += ROW
            elements.append(text(left, y - 4, words, "head"))
        rows = list(zip(figure.layers, figure.at_peak_bytes, strict=True))
        for layer, size in reversed(rows):
            y += ROW
            elements.append(rectangle(left, y - 14, 12, 12, f'rx="2" fill="{paint(layer.use)}"'))
            elements.append(text(left + 20, y - 4, layer.words))
            elements.append(text(right, y - 4, format_bytes(size), "end number"))
        y += ROW
        elements.append(text(left + 20, y - 4, "all of it", "head"))
        elements.append(text(right, y - 4, format_bytes(sum(figure.at_peak_bytes)), "end number head"))
        return y, elements

    def _rest(self, left: float, right: float, y: float) -> tuple[float, list[str]]:
        """Return the legend of the phases, with their seconds, and the other parts of the run."""
        figure, elements = self._figure, []
        x, y = left, y + ROW
        for phase, length in self._length_by_phase().items():
            words = PHASE_WORDS[phase] + (f" {length:.3g} s" if figure.axis == "seconds" else "")
            needed = 18 + width_of(words)
            if x + needed > right and x > left:
                x, y = left, y + ROW
            shade = f'class="band" opacity="{PHASE_SHADES[phase]}"'
            elements += [rectangle(x, y - 14, 12, 12, shade), text(x + 18, y - 4, words)]
            x += needed + 12
        if figure.parts:
            y += ROW + 4
            elements.append(text(left, y - 4, "The rest of the run, at its highest", "head"))
        labels = max((width_of(part.words) for part in figure.parts), default=0) + 12
        scale = (right - left - labels - 70) / self._top_bytes
        top = y + 1
        for part in figure.parts:
            y += ROW
            elements.append(text(left, y - 4, part.words))
            x = left + labels
            for layer, size in zip(figure.layers, part.sizes_bytes, strict=True):
                if size * scale >= 0.05:
                    elements.append(rectangle(x, y - 15, size * scale, 13, f'fill="{paint(layer.use)}"'))
                    x += size * scale
            elements.append(text(right, y - 4, format_bytes(part.total_bytes), "end number"))
        for limit in figure.limits if figure.parts else ():
            if limit.size_bytes < self._top_bytes:
                x = left + labels + limit.size_bytes * scale
                elements.append(line(x, top, x, y, "limit"))
        return y, elements

    def _length_by_phase(self) -> dict[Phase, float]:
        """Return the part of the axis that each phase takes."""
        lengths: dict[Phase, float] = {}
        for band in self._figure.phases:
            if band.phase is not None:
                lengths[band.phase] = lengths.get(band.phase, 0.0) + band.end - band.start
        return lengths
