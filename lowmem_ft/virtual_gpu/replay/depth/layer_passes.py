"""A trace cut into sweeps: the stretches in which a program goes through a model's layers one after the other."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.foundation.memory.timeline import Allocation
from lowmem_ft.virtual_gpu.calls.trace import Trace

Integers = NDArray[np.int64]

OUTSIDE = -1
"""Stands for a layer's number where births are outside all layers."""

ALIVE = -1
"""Stands for the birth before which an allocation dies if it lives to the end."""


class NotRegularError(Exception):
    """The traces do not repeat layer by layer. Trace the whole model instead."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """The way a stack of layers repeats: in one stretch, or in several where the last layers are of other kinds.

    Args:
        stack: qualified name of the list of layers, such as ``model.layers``.
        lead: layers at the beginning that differ from the others.
        period: layers after which the others repeat.
        tails: the first layer of each further stretch, which the program treats differently: it keeps them on the
            device, for example, while it streams those before.
        edge: layers at the beginning of each stretch that are not copied; None: a period.
    """

    stack: str
    lead: int
    period: int
    tails: tuple[int, ...] = ()
    edge: int | None = None

    @property
    def pivots(self) -> tuple[int, ...]:
        """First layer, in each stretch, of the period to repeat, which comes after the edge."""
        edge = self.period if self.edge is None else self.edge
        return tuple(start + edge for start in (self.lead, *self.tails))

    @property
    def afters(self) -> tuple[int, ...]:
        """First layer, in each stretch, after that period."""
        return tuple(pivot + self.period for pivot in self.pivots)

    def is_repeated(self, layer: int) -> bool:
        """Return whether copies of a layer represent missing ones."""
        return any(pivot <= layer < pivot + self.period for pivot in self.pivots)

    def moved(self, layer: int, more: Sequence[int]) -> int:
        """Return a layer's number in a model with more periods in each stretch; a repeated layer keeps its own."""
        return layer + self.period * sum(
            extra for after, extra in zip(self.afters, more, strict=True) if layer >= after
        )


Part = range
"""Numbers of consecutive births: those of one layer's turn, or those outside the layers."""


@dataclass(frozen=True)
class Segment:
    """Either births outside the layers, or a sweep: the births of each layer, in order of visit."""

    parts: dict[int, Part]

    @property
    def is_sweep(self) -> bool:
        """True if it passes through layers."""
        return OUTSIDE not in self.parts

    @property
    def first(self) -> int:
        """The layer that is visited first."""
        return next(iter(self.parts))

    @property
    def last(self) -> int:
        """The layer that is visited last."""
        return next(reversed(self.parts))

    @property
    def goes_up(self) -> bool:
        """True if layers are visited from the first to the last; False for a single layer."""
        return self.first < self.last


@dataclass(frozen=True)
class Places:
    """Positions of births: segment, layer and number in the layer's turn; the last element is the trace's end."""

    segment: Integers
    layer: Integers
    ordinal: Integers


@dataclass(frozen=True)
class Sweeps:
    """A trace as segments.

    Args:
        trace: the trace that is cut.
        segments: its segments, in order.
        num_layers: layers that it passes through.
        dies_before: for each birth, the birth before which it dies, or the number of births if it dies after the last;
            ``ALIVE`` if it does not die.
        work_starts: for each birth, the number of work entries before those that follow it; the number of all at the
            end.
    """

    trace: Trace
    segments: list[Segment]
    num_layers: int
    dies_before: Integers
    work_starts: list[int]

    @classmethod
    def of(cls, trace: Trace, layers: Layers) -> Sweeps:
        """Cut a trace into segments.

        Raises:
            NotRegularError: if it has too few layers, or something that cannot be copied.
        """
        events = trace.timeline.events
        if any(kind == "empty_cache" for kind, _ in events):
            raise NotRegularError("the cache is emptied on the way")
        allocations = trace.timeline.allocations
        labels = _without_gaps(_labels(allocations, layers.stack), allocations)
        if max(labels, default=OUTSIDE) < layers.afters[-1]:
            raise NotRegularError("too few layers")
        num_born = [0, *accumulate(kind == "malloc" for kind, _ in events)]
        dies_before = np.full(len(allocations), ALIVE, np.int64)
        for position, (kind, index) in enumerate(events):
            if kind == "free":
                dies_before[index] = num_born[position]
        follows = [num_born[entry.position] for entry in trace.work]
        work_starts = np.searchsorted(follows, range(1, len(allocations) + 2)).tolist()
        return cls(trace, list(_segments(labels)), max(labels) + 1, dies_before, work_starts)

    @cached_property
    def places(self) -> Places:
        """Position of each birth."""
        parts = [
            (number, layer, part)
            for number, segment in enumerate(self.segments)
            for layer, part in segment.parts.items()
        ]
        lengths = [len(part) for _, _, part in parts]
        return Places(
            np.append(np.repeat([number for number, _, _ in parts], lengths), -1),
            np.append(np.repeat([layer for _, layer, _ in parts], lengths), OUTSIDE),
            np.append(np.concatenate([np.arange(length) for length in lengths]), 0),
        )


def structure_of(trace: Trace) -> str:
    """Return a digest of everything in a trace except numbers of bytes and operations: the events and their order.

    Traces with the same structure are cut in the same way.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(columns: Iterator[tuple[object, ...]]) -> None:
        digest.update(repr(list(zip(*columns, strict=True))).encode())

    add(
        (a.category, a.phase, a.module, a.stream, a.place, a.size_bytes > 0 or a.place == "pinned")
        for a in trace.timeline.allocations
    )
    add((event.kind, event.allocation) for event in trace.timeline.events)
    add((w.kind, w.position, w.stream, w.name, w.event, w.blocking, w.to_host) for w in trace.work)
    return digest.hexdigest()


def _labels(allocations: Sequence[Allocation], stack: str) -> list[int]:
    """Return the layer of each allocation, or ``OUTSIDE``."""
    pattern = re.compile(re.escape(stack) + r"\.(\d+)(?:\.|$)")
    labels: dict[str, int] = {}
    for allocation in allocations:
        if allocation.module not in labels:
            match = pattern.match(allocation.module)
            labels[allocation.module] = int(match[1]) if match else OUTSIDE
    return [labels[allocation.module] for allocation in allocations]


def _without_gaps(labels: list[int], allocations: Sequence[Allocation]) -> list[int]:
    """Attribute allocations between two neighbouring layers to the first of them, as they repeat too.

    The same goes for allocations within one layer's turn. Between two turns of a layer, as between the forward and the
    backward pass of the last one, the phase changes.
    """
    result = list(labels)
    last = None
    for index, label in enumerate(labels):
        if label < 0:
            continue
        if last is not None and last < index - 1:
            step = abs(label - labels[last])
            is_same_turn = step == 0 and allocations[last].phase == allocations[index].phase
            if step == 1 or is_same_turn:
                result[last + 1 : index] = [labels[last]] * (index - last - 1)
        last = index
    return result


def _segments(labels: Sequence[int]) -> Iterator[Segment]:
    """Yield the segments of a sequence of births, given the layer of each."""
    starts = [birth for birth, label in enumerate(labels) if birth == 0 or label != labels[birth - 1]]
    parts: dict[int, Part] = {}
    for start, stop in zip(starts, [*starts[1:], len(labels)], strict=True):
        label = labels[start]
        if parts and not _continues(list(parts), label):
            yield Segment(parts)
            parts = {}
        parts[label] = range(start, stop)
    if parts:
        yield Segment(parts)


def _continues(visited: list[int], label: int) -> bool:
    """Return whether a sweep continues with a layer: with the next one, in the same direction."""
    if OUTSIDE in (label, visited[-1]):
        return False
    step = label - visited[-1]
    return abs(step) == 1 and (len(visited) == 1 or step == visited[-1] - visited[-2])
