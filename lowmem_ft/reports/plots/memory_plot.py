"""The figure of an estimate's memory as a file: a page, an SVG or a PNG."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.packages import require_package
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.reports.plots.figure import MemoryFigure
from lowmem_ft.reports.plots.html_page import page
from lowmem_ft.reports.plots.memory_figure import memory_figure
from lowmem_ft.reports.plots.memory_html import memory_html
from lowmem_ft.reports.plots.memory_svg import memory_svg
from lowmem_ft.reports.plots.svg import COLOURS, PHASE_SHADES, size_ticks, size_words

SUFFIXES = (".html", ".svg", ".png")


def write_plot(path: Path, estimate: MemoryEstimate) -> None:
    """Draw the estimate's timeline into a file, in the format of its suffix.

    Args:
        path: ends in ``.html`` (one self-contained page), ``.svg``, or ``.png`` (needs matplotlib).
        estimate: an estimate with its timeline.

    Raises:
        UserError: if the suffix is another, or the estimate's timeline is empty.
        MissingPackageError: for a PNG without matplotlib.
    """
    check_plot_path(path)
    figure = memory_figure(estimate)
    if path.suffix == ".html":
        title = f"{figure.title} {figure.summary}"
        path.write_text(page(title, "Memory of a step", memory_html(figure)), encoding="utf-8")
    elif path.suffix == ".svg":
        path.write_text(memory_svg(figure), encoding="utf-8")
    else:
        _write_png(path, figure)


def check_plot_path(path: Path) -> None:
    """Refuse a file that :func:`write_plot` could not write, before anything is computed for it.

    Args:
        path: the file to write the plot to.

    Raises:
        UserError: if its suffix is not in ``SUFFIXES``.
        MissingPackageError: for a PNG without matplotlib.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"--plot writes .html, .svg or .png, got {path}. Name it {path.stem}.html.")
    if path.suffix == ".png":
        require_package(f"--plot {path}", "matplotlib", "plots")


def _write_png(path: Path, figure: MemoryFigure) -> None:
    # Without pyplot, which would look for a display.
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    drawing = Figure(figsize=(11, 5.5), layout="constrained")
    axes = drawing.add_subplot()
    for band in figure.phases:
        axes.axvspan(
            band.start, band.end, 0.96, 1, color="black", alpha=PHASE_SHADES[band.phase or "forward"], lw=0
        )
        if (band.end - band.start) / figure.end > len(band.words) / 110:
            axes.text(
                (band.start + band.end) / 2,
                0.978,
                band.words,
                transform=axes.get_xaxis_transform(),
                ha="center",
                va="center",
            )
    axes.stackplot(
        [*figure.moments, figure.end],
        [[*layer.sizes_bytes, layer.sizes_bytes[-1]] for layer in figure.layers],
        labels=[
            f"{layer.words}, {format_bytes(size)}"
            for layer, size in zip(figure.layers, figure.at_peak_bytes, strict=True)
        ],
        colors=[COLOURS[layer.use] for layer in figure.layers],
        linewidth=0,
        step="post",
    )
    highest = max(figure.highest_bytes, figure.process.size_bytes)
    near = [limit for limit in figure.limits if limit.size_bytes <= 2 * highest]
    top = 1.15 * max(highest, *(limit.size_bytes for limit in near))
    for limit, style in ((figure.process, "-"), *((limit, "--") for limit in near)):
        axes.axhline(limit.size_bytes, color="black", linewidth=1, linestyle=style)
        axes.text(0, limit.size_bytes, f" {limit.words}", va="bottom")
    if figure.peak is not None:
        tensors = list(accumulate(figure.at_peak_bytes))[-1]
        axes.plot(figure.moments[figure.peak], tensors, "o", color="black", markersize=4)
    ticks = size_ticks(top, 7)
    axes.set_yticks(ticks, [size_words(tick) for tick in ticks])
    beyond = [limit.words for limit in figure.limits if limit not in near]
    axes.set(
        title="\n".join((figure.title, figure.summary, *beyond)),
        xlabel=figure.axis_words,
        xlim=(0, figure.end),
        ylim=(0, top),
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    heading = f"at the peak: {figure.peak_words}"
    axes.legend(
        handles[::-1], labels[::-1], title=heading, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False
    )
    drawing.savefig(path, dpi=150)
