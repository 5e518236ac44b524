"""Properties that both kinds of plot share: colours, shades, and the ranges of the axes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowmem_ft.foundation.units import GIB, KIB, MIB, TIB, format_bytes
from lowmem_ft.memory.category import Category, Phase
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.reports.plots.memory_series import STACKED, MemorySample
from lowmem_ft.reports.wording import PHASE_WORDS, module_words

COLOURS: dict[Category, str] = {
    "parameter": "#0072b2",
    "optimizer_state": "#009e73",
    "gradient": "#d55e00",
    "workspace": "#999999",
    "communication": "#000000",
    "input": "#f0e442",
    "activation": "#e69f00",
    "logits_and_loss": "#cc79a7",
    "temporary": "#56b4e9",
}
"""The palette of Okabe and Ito (2008), which colour-blind people can tell apart, on black and on white."""

PHASE_SHADES: dict[Phase, float] = {
    "load": 0.1,
    "forward": 0.0,
    "backward": 0.06,
    "optimizer_step": 0.14,
    "evaluation": 0.03,
    "save": 0.1,
}
"""Darkness of the background of each phase, from 0 to 1: neighbours differ."""


LETTERS_ACROSS = 110
"""Approximate number of letters of a label that fit across a plot."""


@dataclass(frozen=True, kw_only=True)
class PlotFrame:
    """The ranges of the axes: positions in the timeline, and bytes from 0.

    Args:
        start: first position.
        end: last position.
        top_bytes: upper end of the vertical axis.
        shows_limit: whether the device's memory is drawn as a line, as it is not far above the samples.
        limit_words: label of that line.
    """

    start: int
    end: int
    top_bytes: int
    shows_limit: bool
    limit_words: str

    @classmethod
    def around(cls, estimate: MemoryEstimate, samples: Sequence[MemorySample]) -> PlotFrame:
        """Return the frame of all samples; with the device's memory unless that is unknown or flattens them."""
        highest_bytes = max(sample.total_bytes for sample in samples)
        limit_bytes = estimate.gpu.memory_bytes
        shows_limit = 0 < limit_bytes <= 2 * highest_bytes
        top_bytes = max(highest_bytes, limit_bytes) if shows_limit else highest_bytes
        return cls(
            start=samples[0].position,
            end=max(samples[-1].position, samples[0].position + 1),
            top_bytes=max(1, top_bytes * 11 // 10),
            shows_limit=shows_limit,
            limit_words=f"memory of {estimate.gpu.name}: {format_bytes(limit_bytes)}",
        )

    @property
    def ticks_bytes(self) -> list[int]:
        """Round sizes within the vertical axis, at most seven."""
        unit = next((unit for unit in (TIB, GIB, MIB, KIB) if unit <= self.top_bytes), 1)
        # The top is below 1024 units, so the largest of these steps gives few enough ticks.
        steps = (unit * digit * 10**power for power in range(3) for digit in (1, 2, 5))
        step = next(step for step in steps if self.top_bytes < 7 * step)
        return list(range(0, self.top_bytes + 1, step))


def shown_categories(samples: Sequence[MemorySample]) -> list[Category]:
    """Return the categories that ever hold anything, from the bottom of the stack to its top."""
    return [
        category
        for index, category in enumerate(STACKED)
        if any(sample.stacked_bytes[index] for sample in samples)
    ]


def band_label(frame: PlotFrame, phase: Phase, start: int, end: int) -> str:
    """Return the name of a phase, if its stretch is wide enough for it; else an empty string."""
    words = PHASE_WORDS[phase]
    return words if (end - start) * LETTERS_ACROSS > len(words) * (frame.end - frame.start) else ""


def peak_words(estimate: MemoryEstimate) -> str:
    """Return the label of the mark at the peak."""
    phase, module = PHASE_WORDS[estimate.peak_phase], module_words(estimate.peak_module)
    return f"peak {format_bytes(estimate.allocated_peak_bytes)} in {phase}, {module}"
