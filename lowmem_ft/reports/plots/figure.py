"""Figures as plain values, which every writer draws: memory over one step, and lines over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.memory.category import Category, Phase

__all__ = ["Band", "Layer", "Limit", "Line", "LineFigure", "MemoryFigure", "Part"]

Use = Category | Literal["context", "cached"]
"""The use of a layer of the stack: tensors by category, what surrounds them, and what the allocator caches."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One use of memory over the step.

    Attributes:
        use: the use, by which writers choose the colour.
        words: its name for people.
        sizes_bytes: bytes from each moment on, shape [moments].
    """

    use: Use
    words: str
    sizes_bytes: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Band:
    """A stretch of the axis with a name.

    Attributes:
        words: the name, for a micro-batch its number.
        start: where it begins, in units of the axis.
        end: where it ends.
        phase: the phase; None for a micro-batch.
    """

    words: str
    start: float
    end: float
    phase: Phase | None = None


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A size that is drawn as a line across the figure.

    Attributes:
        words: what it is, with the size in words.
        size_bytes: the size.
    """

    words: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Part:
    """Another part of the run, at its highest moment.

    Attributes:
        words: its name.
        sizes_bytes: bytes of each layer, in the order of ``MemoryFigure.layers``.
    """

    words: str
    sizes_bytes: Sequence[int]

    @property
    def total_bytes(self) -> int:
        """Bytes of all layers."""
        return sum(self.sizes_bytes)


@dataclass(frozen=True, kw_only=True)
class MemoryFigure:
    """A process's memory on one device over one optimizer step, as a stack, and in the rest of the run.

    Attributes:
        title: the model, in a few words.
        summary: the verdict.
        axis: what the horizontal axis counts: seconds by the device's clock, or events where there is no clock.
        axis_words: its label.
        moments: where the stack changes, in units of the axis, increasing from 0, shape [moments]; sizes stay as they
            are up to the next moment.
        end: where the axis ends.
        layers: the stack, from the bottom to the top.
        places: for each moment, its phase and module in words.
        phases: the phases, end to end.
        micro_batches: the micro-batches of the step; empty if there is only one.
        limits: sizes not to exceed: the device's memory, and a budget below it.
        process: the most bytes of the process over the run: the figure that the estimate gives, with its range.
        peak: index of the moment at which tensors take most; None: that is in another part.
        peak_words: where that is.
        at_peak_bytes: bytes of each layer then.
        parts: the other parts of the run, each at its highest moment.
    """

    title: str
    summary: str
    axis: Literal["seconds", "events"]
    axis_words: str
    moments: Sequence[float]
    end: float
    layers: Sequence[Layer]
    places: Sequence[tuple[str, str]]
    phases: Sequence[Band]
    micro_batches: Sequence[Band]
    limits: Sequence[Limit]
    process: Limit
    peak: int | None
    peak_words: str
    at_peak_bytes: Sequence[int]
    parts: Sequence[Part]

    @property
    def totals_bytes(self) -> list[int]:
        """Height of the stack from each moment on, shape [moments]."""
        return [sum(sizes) for sizes in zip(*(layer.sizes_bytes for layer in self.layers), strict=True)]

    @property
    def highest_bytes(self) -> int:
        """The most bytes that are drawn, in the step or in another part."""
        return max((*self.totals_bytes, *(part.total_bytes for part in self.parts)))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a figure.

    Attributes:
        words: its name.
        points: abscissa and ordinate of each point, in order.
        shows_points: whether each point is marked.
    """

    words: str
    points: Sequence[tuple[float, float]]
    shows_points: bool = False


@dataclass(frozen=True, kw_only=True)
class LineFigure:
    """Lines over a common axis.

    Attributes:
        title: what they show.
        axis_words: label of the horizontal axis.
        unit: what ordinates count; bytes are written as sizes, from 0 on.
        lines: at least one, with at least one point.
        limits: ordinates that are drawn as lines across; only for bytes.
        starts_at_zero: whether an axis of other numbers than bytes begins at 0, too, and not near the lowest point.
    """

    title: str
    axis_words: str
    unit: Literal["bytes", "number"]
    lines: Sequence[Line]
    limits: Sequence[Limit] = ()
    starts_at_zero: bool = False
