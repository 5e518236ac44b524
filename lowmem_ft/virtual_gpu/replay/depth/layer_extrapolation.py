"""The trace of a deep model from that of a shallow one, where it is exact.

Decoder layers repeat, and so does what they allocate. A trace is cut into *sweeps*; in each of them, the part of one
layer is copied for the missing layers. The end of an allocation's life is kept relative: an activation that dies in the
backward part of its own layer does so in every copy.

``repetition_proof.py`` proves that the program really is that regular. An allocation outside all layers that grows with
their number (a stack of all gradients' norms) grows linearly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.foundation.host.pinned_memory import PAGE_BYTES
from lowmem_ft.foundation.memory.timeline import Allocation, Event, Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import (
    ALIVE,
    OUTSIDE,
    Integers,
    Layers,
    NotRegularError,
    Part,
    Segment,
    Sweeps,
)


class GrowingSize(NamedTuple):
    """An allocation's bytes in the short trace, and those that each further period adds.

    Args:
        size_bytes: bytes in the short trace.
        more_bytes: bytes that each further period adds, to ``asked_bytes`` if that is not 0, else to ``size_bytes``.
        asked_bytes: bytes requested, for memory in whole pages; 0 for other memory.
    """

    size_bytes: int
    more_bytes: int
    asked_bytes: int = 0

    def grown(self, allocation: Allocation, extra: int) -> Allocation:
        """Return the allocation in a model with ``extra`` further periods."""
        if not self.asked_bytes:
            return dataclasses.replace(allocation, size_bytes=self.size_bytes + extra * self.more_bytes)
        asked_bytes = self.asked_bytes + extra * self.more_bytes
        size_bytes = -(-asked_bytes // PAGE_BYTES) * PAGE_BYTES
        return dataclasses.replace(allocation, size_bytes=size_bytes, asked_bytes=asked_bytes)


class GrowingWork(NamedTuple):
    """The work that follows a birth where it grows: entries that get larger, or entries that are inserted.

    Args:
        costs: bytes and operations of each entry in the short trace.
        more: bytes, operations and launches that each further period adds to them.
        added: entries that each further period adds, with the index of the entry before which they come.
    """

    costs: tuple[tuple[int, int], ...]
    more: tuple[tuple[int, int, float], ...] = ()
    added: tuple[tuple[int, tuple[Work, ...]], ...] = ()

    def grown(self, entries: Sequence[Work], extra: int) -> list[Work]:
        """Return the work of a model with ``extra`` further periods."""
        if self.more:
            return [
                dataclasses.replace(
                    entry,
                    num_bytes=entry.num_bytes + extra * num_bytes,
                    flops=entry.flops + extra * flops,
                    launches=entry.launches + extra * launches,
                )
                for entry, (num_bytes, flops, launches) in zip(entries, self.more, strict=True)
            ]
        result, done = [], 0
        for position, added in self.added:
            result += [*entries[done:position], *(added * extra)]
            done = position
        return [*result, *entries[done:]]


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """Result of a proof from two traces: how a trace with any number of layers follows from the shorter one.

    It also holds for other traces of the same structure, if everything that grows has the same size there. Where layers
    repeat in several stretches, ``more`` is the number of periods that each of them has beyond the short trace.

    Args:
        layers: how the layers repeat.
        structure: structure of the short trace, see
            :func:`~lowmem_ft.virtual_gpu.replay.depth.layer_passes.structure_of`.
        is_relative: for each birth, whether the layer in whose turn it dies is as far from its own in every copy.
        goes_with: for each birth and each stretch, whether that layer moves on as the stretch gets longer.
        sizes: sizes of births that are larger in deeper models.
        work: work after births that have more of it in deeper models.
        parameters: parameters that a period has, and those of them that are trained.
    """

    layers: Layers
    structure: str
    is_relative: NDArray[np.bool_]
    goes_with: NDArray[np.bool_]
    sizes: Mapping[int, GrowingSize]
    work: Mapping[int, GrowingWork]
    parameters: tuple[int, int]

    def holds_for(self, short: Trace) -> bool:
        """Return whether another short trace of the same structure differs from the proved one only where it may."""
        allocations = short.timeline.allocations
        if any(
            (allocations[birth].size_bytes, allocations[birth].asked_bytes)
            != (size.size_bytes, size.asked_bytes)
            for birth, size in self.sizes.items()
        ):
            return False
        sweeps = Sweeps.of(short, self.layers)
        return all(costs_of(work_behind(sweeps, birth)) == work.costs for birth, work in self.work.items())

    def extend(self, short: Trace, more: Sequence[int]) -> Trace:
        """Return the trace of a deeper model.

        Args:
            short: a trace that this holds for.
            more: further periods of each stretch.

        Returns:
            The trace. Frees between two allocations are in the order of birth.

        Raises:
            NotRegularError: if an allocation would die at a point that the extended trace lacks.
        """
        sweeps = Sweeps.of(short, self.layers)
        return self.extended(sweeps, more).trace(sweeps, self)

    def refuse_depth(self, short: Trace, more: Sequence[int]) -> None:
        """Raise what :meth:`extend` would raise, without the trace.

        Raises:
            NotRegularError: as :meth:`extend` does.
        """
        self.extended(Sweeps.of(short, self.layers), more)

    def extended(self, sweeps: Sweeps, more: Sequence[int]) -> Extended:
        """Return the deeper model that :meth:`extend` makes a trace of.

        Raises:
            NotRegularError: as :meth:`extend` does.
        """
        turns = list(_turns(sweeps, self.layers, more))
        lengths = [len(turn.part) for turn in turns]
        source = np.concatenate([np.arange(turn.part.start, turn.part.stop) for turn in turns])
        shift = np.repeat([turn.layer - turn.source for turn in turns], lengths)
        return Extended(sum(more), turns, source, shift, self._deaths(sweeps, more, turns, source, shift))

    def _deaths(
        self, sweeps: Sweeps, more: Sequence[int], turns: list[_Turn], source: Integers, shift: Integers
    ) -> Integers:
        """Return, for each birth of the extended model, the birth before which it dies."""
        dies_before = sweeps.dies_before[source]
        dies_last = dies_before == len(sweeps.dies_before)
        dies_at_birth = (dies_before != ALIVE) & ~dies_last
        at = dies_before[dies_at_birth]
        places = sweeps.places
        layer = (
            places.layer[at]
            + self.goes_with[source][dies_at_birth] @ np.array(more) * self.layers.period
            + self.is_relative[source][dies_at_birth] * shift[dies_at_birth]
        )
        starts = np.full((len(sweeps.segments), sweeps.num_layers + sum(more) * self.layers.period + 1), -1)
        lengths = np.zeros_like(starts)
        num_births = 0
        for turn in turns:
            starts[turn.segment, turn.layer] = num_births  # OUTSIDE is the last column
            lengths[turn.segment, turn.layer] = len(turn.part)
            num_births += len(turn.part)
        if ((layer < OUTSIDE) | (layer >= starts.shape[1] - 1)).any():
            raise NotRegularError("an allocation dies where the extended trace has no layer")
        if (places.ordinal[at] >= lengths[places.segment[at], layer]).any():
            raise NotRegularError("an allocation dies where the extended trace has nothing")
        result = np.where(dies_last, num_births, ALIVE)
        result[dies_at_birth] = starts[places.segment[at], layer] + places.ordinal[at]
        dead = np.flatnonzero(result != ALIVE)
        if (dead >= result[dead]).any():
            raise NotRegularError("an allocation dies before it is born")
        return result


class _Turn(NamedTuple):
    """A layer of the extended model (or ``OUTSIDE``), the layer here that it copies, and that layer's births."""

    segment: int
    source: int
    layer: int
    part: Part


def _turns(sweeps: Sweeps, layers: Layers, more: Sequence[int]) -> Iterator[_Turn]:
    """Yield, in order, the turns of a model with more of the repeated periods."""
    for number, segment in enumerate(sweeps.segments):
        if not segment.is_sweep:
            yield _Turn(number, OUTSIDE, OUTSIDE, segment.parts[OUTSIDE])
            continue
        for layer, source in _visited(segment, layers, more):
            if source not in segment.parts:
                raise NotRegularError(f"layer {layer} has nothing to be copied from")
            yield _Turn(number, source, layer, segment.parts[source])


def _visited(segment: Segment, layers: Layers, more: Sequence[int]) -> list[tuple[int, int]]:
    """Return the layers that a sweep visits in the deeper model, and the layers here that they copy."""
    first, last = min(segment.parts), max(segment.parts)
    visited: list[tuple[int, int]] = []
    for source in range(first, last + 1):
        visited.append((layers.moved(source, more), source))
        for pivot, after, extra in zip(layers.pivots, layers.afters, more, strict=True):
            if source == after - 1 and last >= after:
                if first > pivot:
                    raise NotRegularError("a pass through the layers begins in the middle")
                copied = range(pivot, after)
                start = layers.moved(after, more) - extra * layers.period
                visited += zip(itertools.count(start), [*copied] * extra, strict=False)
    return visited if segment.goes_up else visited[::-1]


@dataclass(frozen=True)
class Extended:
    """A deeper model: for each birth, the birth here that it copies, its distance in layers, and its end.

    Args:
        extra: further periods, of all stretches together.
        turns: the turns, in order.
        source: for each birth, the birth here that it copies.
        shift: layers between the two.
        dies_before: for each birth, the birth before which it dies.
    """

    extra: int
    turns: list[_Turn]
    source: Integers
    shift: Integers
    dies_before: Integers

    def allocations(self, sweeps: Sweeps, shown: Repetition) -> list[Allocation]:
        """Return the allocations of the extended model."""
        prefix = f"{shown.layers.stack}."
        here = list(sweeps.trace.timeline.allocations)
        for birth, size in shown.sizes.items():
            here[birth] = size.grown(here[birth], self.extra)
        result: list[Allocation] = []
        for turn in self.turns:
            part = here[turn.part.start : turn.part.stop]
            if turn.layer != turn.source:
                old, new = f"{prefix}{turn.source}", f"{prefix}{turn.layer}"
                part = [_renumbered(allocation, old, new) for allocation in part]
            result += part
        return result

    def work_behind(self, sweeps: Sweeps, shown: Repetition) -> list[list[Work]]:
        """Return the work after each birth of the shallow model, grown as in the extended model."""
        starts, entries = sweeps.work_starts, sweeps.trace.work
        behind = [entries[start:stop] for start, stop in itertools.pairwise(starts)]
        for birth, growing in shown.work.items():
            behind[birth] = growing.grown(behind[birth], self.extra)
        return behind

    def refuse_difference(self, sweeps: Sweeps, real: Sweeps, shown: Repetition) -> None:
        """Compare with a real deeper model: the same births with the same sizes, purposes, deaths and work.

        Raises:
            NotRegularError: if they differ.
        """
        turns = [(turn.segment, turn.layer, len(turn.part)) for turn in self.turns]
        theirs = [
            (number, layer, len(part))
            for number, segment in enumerate(real.segments)
            for layer, part in segment.parts.items()
        ]
        if [turn[:2] for turn in turns] != [turn[:2] for turn in theirs]:
            raise NotRegularError("the traces pass through the layers in different order")
        is_same = turns == theirs and np.array_equal(self.dies_before, real.dies_before)
        if is_same:
            behind = self.work_behind(sweeps, shown)
            work = [entry for birth in self.source.tolist() for entry in behind[birth]]
            rest = real.trace.work[real.work_starts[0] :]
            is_same = (
                self.allocations(sweeps, shown) == real.trace.timeline.allocations
                and list(map(cost_of, work)) == list(map(cost_of, rest))
                and all(
                    len(behind[birth]) == stop - start
                    for birth, start, stop in zip(
                        self.source.tolist(), real.work_starts, real.work_starts[1:], strict=False
                    )
                )
            )
        if not is_same:
            raise NotRegularError("what a layer does, or what lies outside the layers, does not repeat")

    def trace(self, sweeps: Sweeps, shown: Repetition) -> Trace:
        """Return the trace of the extended model."""
        num_births = len(self.source)
        dead = np.flatnonzero(self.dies_before != ALIVE)
        dead = dead[np.argsort(self.dies_before[dead], kind="stable")]
        num_dead = np.searchsorted(self.dies_before[dead], np.arange(num_births + 1), side="right")
        born_at = np.arange(num_births) + num_dead[:-1]
        is_birth = np.zeros(num_births + len(dead), bool)
        is_birth[born_at] = True
        indices = np.empty(len(is_birth), np.int64)
        indices[is_birth], indices[~is_birth] = np.arange(num_births), dead
        kinds = map(("free", "malloc").__getitem__, is_birth.tolist())
        events = list(map(Event, kinds, indices.tolist()))
        # Work that follows a birth comes after the deaths that follow the birth, too.
        positions = (np.arange(num_births) + 1 + num_dead[1:]).tolist()
        work = sweeps.trace.work[: sweeps.work_starts[0]]
        work = [entry.at(0) for entry in work]
        behind = self.work_behind(sweeps, shown)
        for birth, position in zip(self.source.tolist(), positions, strict=True):
            for entry in behind[birth]:
                work.append(entry.at(position))
        model, (parameters, trainable) = sweeps.trace.model, shown.parameters
        model = dataclasses.replace(
            model,
            parameters=model.parameters + self.extra * parameters,
            trainable_parameters=model.trainable_parameters + self.extra * trainable,
        )
        timeline = Timeline(self.allocations(sweeps, shown), events)
        return dataclasses.replace(sweeps.trace, timeline=timeline, work=work, model=model)


def _renumbered(allocation: Allocation, old: str, new: str) -> Allocation:
    module = allocation.module
    if module != old and not module.startswith(f"{old}."):
        return allocation
    return Allocation(
        size_bytes=allocation.size_bytes,
        category=allocation.category,
        phase=allocation.phase,
        module=new + module[len(old) :],
        stream=allocation.stream,
        place=allocation.place,
        asked_bytes=allocation.asked_bytes,
    )


def work_behind(sweeps: Sweeps, birth: int) -> list[Work]:
    """Return the work that follows a birth."""
    return sweeps.trace.work[sweeps.work_starts[birth] : sweeps.work_starts[birth + 1]]


def cost_of(entry: Work) -> tuple[object, ...]:
    """Return the properties that equal entries of work share, wherever they are in a trace."""
    return entry.kind, entry.name, entry.flops, entry.num_bytes, entry.stream


def costs_of(entries: Sequence[Work]) -> tuple[tuple[int, int], ...]:
    """Return the bytes and operations of each entry."""
    return tuple((entry.num_bytes, entry.flops) for entry in entries)
