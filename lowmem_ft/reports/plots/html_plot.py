"""Plot of a run's memory as one self-contained page: an interactive stacked plot, and the same as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.memory.category import PHASES, Category
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.reports.plots.memory_series import STACKED, MemorySample, phase_bands
from lowmem_ft.reports.plots.plot_frame import (
    COLOURS,
    PHASE_SHADES,
    PlotFrame,
    band_label,
    peak_words,
    shown_categories,
)
from lowmem_ft.reports.wording import CATEGORY_WORDS, PHASE_WORDS, module_words, short_name, verdict

WIDTH, HEIGHT = 1000, 420
LEFT, RIGHT, TOP, BOTTOM = 72, 8, 24, 8
"""Margins of the plot within the drawing."""


def html_plot(estimate: MemoryEstimate, samples: Sequence[MemorySample]) -> str:
    """Return the page, with everything in it: it loads nothing.

    Args:
        estimate: what the page shows.
        samples: samples of the estimate's timeline; at least one.

    Returns:
        The text of an HTML file.
    """
    frame = PlotFrame.around(estimate, samples)
    shown = shown_categories(samples)
    drawing = _Drawing(frame)
    page = Template(files("lowmem_ft.reports").joinpath("memory_plot.html").read_text(encoding="utf-8"))
    return page.substitute(
        title=escape(f"{short_name(estimate.model.name)} {verdict(estimate)}"),
        summary=escape(_summary(estimate, frame)),
        alternative=escape(
            f"Stacked memory over the run; {peak_words(estimate)}. The table below has the same numbers."
        ),
        size=f"0 0 {WIDTH} {HEIGHT}",
        drawing="\n".join(drawing.elements(estimate, samples, shown)),
        legend="\n".join(_legend(shown)),
        table_head="".join(f"<th>{CATEGORY_WORDS[category]}</th>" for category in shown),
        table_rows="\n".join(_table_rows(samples, shown)),
        data=_data(samples, shown, drawing),
    )


class _Drawing:
    """SVG elements, in the order in which they are painted."""

    def __init__(self, frame: PlotFrame) -> None:
        self._frame = frame

    def x(self, position: float) -> float:
        """Return the horizontal coordinate of a position of the timeline."""
        frame = self._frame
        share = (position - frame.start) / (frame.end - frame.start)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, size_bytes: int) -> float:
        """Return the vertical coordinate of a size."""
        return round(HEIGHT - BOTTOM - size_bytes / self._frame.top_bytes * (HEIGHT - TOP - BOTTOM), 1)

    def elements(
        self, estimate: MemoryEstimate, samples: Sequence[MemorySample], shown: Sequence[Category]
    ) -> Iterator[str]:
        """Yield all elements except those that move with the pointer."""
        yield from self._bands(samples)
        yield from self._grid()
        yield from self._areas(samples, shown)
        yield from self._limit(estimate)
        yield from self._peak(estimate, samples)

    def _bands(self, samples: Sequence[MemorySample]) -> Iterator[str]:
        for phase, start, end in phase_bands(samples, self._frame.end):
            left, width = self.x(start), round(self.x(end) - self.x(start), 1)
            shade, height = PHASE_SHADES[phase], HEIGHT - BOTTOM
            yield f'<rect x="{left}" y="0" width="{width}" height="{height}" class="band" opacity="{shade}"/>'
            if label := band_label(self._frame, phase, start, end):
                middle = round(left + width / 2, 1)
                yield f'<text x="{middle}" y="15" text-anchor="middle">{label}</text>'

    def _grid(self) -> Iterator[str]:
        for tick in self._frame.ticks_bytes:
            y = self.y(tick)
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="grid"/>'
            yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{format_bytes(tick)}</text>'

    def _areas(self, samples: Sequence[MemorySample], shown: Sequence[Category]) -> Iterator[str]:
        below = [0] * len(samples)
        for category in shown:
            index = STACKED.index(category)
            above = [low + sample.stacked_bytes[index] for low, sample in zip(below, samples, strict=True)]
            edge = self._points(samples, above) + self._points(samples, below)[::-1]
            yield f'<polygon points="{" ".join(edge)}" fill="{COLOURS[category]}"/>'
            below = above

    def _points(self, samples: Sequence[MemorySample], sizes_bytes: Sequence[int]) -> list[str]:
        pairs = zip(samples, sizes_bytes, strict=True)
        return [f"{self.x(sample.position)},{self.y(size)}" for sample, size in pairs]

    def _limit(self, estimate: MemoryEstimate) -> Iterator[str]:
        if self._frame.shows_limit:
            y = self.y(estimate.gpu.memory_bytes)
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" class="limit"/>'
            yield f'<text x="{LEFT + 6}" y="{y - 5:.1f}">{escape(self._frame.limit_words)}</text>'

    def _peak(self, estimate: MemoryEstimate, samples: Sequence[MemorySample]) -> Iterator[str]:
        peak = max(samples, key=lambda sample: sample.total_bytes)
        x, y = self.x(peak.position), self.y(peak.total_bytes)
        anchor = "end" if x > WIDTH / 2 else "start"
        yield f'<circle cx="{x}" cy="{y}" r="4" class="peak"/>'
        yield f'<text x="{x}" y="{y - 8:.1f}" text-anchor="{anchor}">{escape(peak_words(estimate))}</text>'


def _summary(estimate: MemoryEstimate, frame: PlotFrame) -> str:
    sizes = (
        f"Peaks: allocated {format_bytes(estimate.allocated_peak_bytes)}, "
        f"reserved {format_bytes(estimate.reserved_peak_bytes)}, "
        f"process {format_bytes(estimate.process_peak_bytes)}"
    )
    limit = f"; {frame.limit_words}" if estimate.gpu.memory_bytes else ""
    return f"{sizes}{limit}. The plot shows the memory of tensors, in the order of allocations and frees."


def _legend(shown: Sequence[Category]) -> Iterator[str]:
    for category in reversed(shown):
        yield (
            f'<tr><td><i style="background:{COLOURS[category]}"></i>{CATEGORY_WORDS[category]}</td>'
            '<td class="now"></td></tr>'
        )


def _table_rows(samples: Sequence[MemorySample], shown: Sequence[Category]) -> Iterator[str]:
    """Yield the highest sample of each phase."""
    for phase in PHASES:
        of_phase = [sample for sample in samples if sample.phase == phase]
        if not of_phase:
            continue
        highest = max(of_phase, key=lambda sample: sample.total_bytes)
        sizes = [highest.total_bytes, *(highest.stacked_bytes[STACKED.index(category)] for category in shown)]
        cells = "".join(f"<td>{format_bytes(size)}</td>" for size in sizes)
        module = escape(module_words(highest.module))
        yield f"<tr><th>{PHASE_WORDS[phase]}</th>{cells}<td>{module}</td></tr>"


def _data(samples: Sequence[MemorySample], shown: Sequence[Category], drawing: _Drawing) -> str:
    """Return the data of the page's script: per sample x, phase, module, and bytes in the order of the legend."""
    modules = sorted({sample.module for sample in samples})
    index_of_module = {module: index for index, module in enumerate(modules)}
    rows = [
        [
            drawing.x(sample.position),
            PHASES.index(sample.phase),
            index_of_module[sample.module],
            *(sample.stacked_bytes[STACKED.index(category)] for category in reversed(shown)),
        ]
        for sample in samples
    ]
    data = {
        "phases": [PHASE_WORDS[phase] for phase in PHASES],
        "modules": [module_words(module) for module in modules],
        "samples": rows,
    }
    # A module's name must not be able to end the script element.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
