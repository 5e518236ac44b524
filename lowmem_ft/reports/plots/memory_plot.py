"""Plot of a run's memory over time, stacked by category, as a picture or as an interactive page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.packages import require_package
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.memory.allocator.replay import replay
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.reports.plots.html_plot import html_plot
from lowmem_ft.reports.plots.memory_series import STACKED, MemorySample, phase_bands, sample_memory
from lowmem_ft.reports.plots.plot_frame import (
    COLOURS,
    PHASE_SHADES,
    PlotFrame,
    band_label,
    peak_words,
    shown_categories,
)
from lowmem_ft.reports.wording import CATEGORY_WORDS, short_name, verdict


def write_plot(path: Path, estimate: MemoryEstimate, config: AllocatorConfig | None = None) -> None:
    """Draw the estimate's timeline into a file, in the format of its suffix.

    Args:
        path: ends in ``.html`` (one self-contained page) or ``.png`` (needs matplotlib).
        estimate: an estimate with its timeline.
        config: settings of a GPU's caching allocator; None: PyTorch's defaults.

    Raises:
        UserError: if the suffix is another, or the estimate's timeline is empty.
        MissingPackageError: for a picture without matplotlib.
    """
    check_plot_path(path)
    if path.suffix == ".html":
        path.write_text(plot_page(estimate, config), encoding="utf-8")
    else:
        _write_png(path, estimate, _samples(estimate, config))


def plot_page(estimate: MemoryEstimate, config: AllocatorConfig | None = None) -> str:
    """Return the estimate's timeline as the text of one self-contained HTML page.

    Args:
        estimate: an estimate with its timeline.
        config: as for :func:`write_plot`.

    Raises:
        UserError: if the estimate's timeline is empty.
    """
    return html_plot(estimate, _samples(estimate, config))


def check_plot_path(path: Path) -> None:
    """Refuse a file that :func:`write_plot` could not write, before anything is computed for it.

    Args:
        path: the file to write the plot to.

    Raises:
        UserError: if its suffix is neither ``.html`` nor ``.png``.
        MissingPackageError: for a picture without matplotlib.
    """
    if path.suffix not in (".html", ".png"):
        raise UserError(f"--plot writes .html or .png, got {path}. Name it {path.stem}.html.")
    if path.suffix == ".png":
        require_package(f"--plot {path}", "matplotlib", "plots")


def _samples(estimate: MemoryEstimate, config: AllocatorConfig | None) -> list[MemorySample]:
    samples = sample_memory(estimate.timeline, sizes_bytes=_block_bytes(estimate, config))
    if not samples:
        raise UserError("A plot needs an estimate with its timeline, got one without allocations.")
    return samples


def _block_bytes(estimate: MemoryEstimate, config: AllocatorConfig | None) -> Sequence[int] | None:
    """Return the device bytes of each allocation, as the estimate's peak counts them; None on a CPU: as requested."""
    if estimate.is_of_cpu:
        return None
    return replay(estimate.timeline, CachingAllocator(config)).block_bytes


def _write_png(path: Path, estimate: MemoryEstimate, samples: list[MemorySample]) -> None:
    # Without pyplot, which would look for a display.
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    frame = PlotFrame.around(estimate, samples)
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes = figure.add_subplot()
    _draw_bands(axes, frame, samples)
    shown = shown_categories(samples)
    axes.stackplot(
        [sample.position for sample in samples],
        [[sample.stacked_bytes[STACKED.index(category)] for sample in samples] for category in shown],
        labels=[CATEGORY_WORDS[category] for category in shown],
        colors=[COLOURS[category] for category in shown],
        linewidth=0,
    )
    if frame.shows_limit:
        axes.axhline(estimate.gpu.memory_bytes, color="black", linewidth=1, linestyle="--")
        axes.text(frame.start, estimate.gpu.memory_bytes, f" {frame.limit_words}", va="bottom")
    axes.set(
        title=f"{short_name(estimate.model.name)}\n{verdict(estimate)}",
        xlabel="allocations and frees, in order",
        xlim=(frame.start, frame.end),
        ylim=(0, frame.top_bytes),
    )
    _mark_peak(axes, estimate, samples)
    axes.set_yticks(frame.ticks_bytes, [format_bytes(tick) for tick in frame.ticks_bytes])
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, dpi=150)


def _draw_bands(axes: Any, frame: PlotFrame, samples: list[MemorySample]) -> None:
    for phase, start, end in phase_bands(samples, frame.end):
        axes.axvspan(start, end, color="black", alpha=PHASE_SHADES[phase], linewidth=0)
        label = band_label(frame, phase, start, end)
        axes.text((start + end) / 2, 0.99, label, transform=axes.get_xaxis_transform(), ha="center", va="top")


def _mark_peak(axes: Any, estimate: MemoryEstimate, samples: list[MemorySample]) -> None:
    peak = max(samples, key=lambda sample: sample.total_bytes)
    axes.plot(peak.position, peak.total_bytes, "o", color="black", markersize=4)
    is_right = peak.position > sum(axes.get_xlim()) / 2
    axes.annotate(
        peak_words(estimate),
        (peak.position, peak.total_bytes),
        xytext=(0, 6),
        textcoords="offset points",
        ha="right" if is_right else "left",
    )
