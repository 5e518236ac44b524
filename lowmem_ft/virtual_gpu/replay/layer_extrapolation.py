"""The trace of a deep model from that of a shallow one, where it is exact.

Decoder layers repeat, and so does what they allocate. A trace is cut into *sweeps*, in each of which the part of one
layer is copied for the layers that are missing. What an allocation lives until is kept relative: an activation that
dies in the backward part of its own layer does so in every copy.

Whether the program really is that regular is not taken on trust: :func:`prove` gets two short traces, and the shorter
one, extended, must be the longer one, event for event. What lies outside all layers and grows with their number (a
stack of all gradients' norms) grows linearly.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.memory.timeline import Allocation, Event, Timeline
from lowmem_ft.virtual_gpu.replay.sweeps import (
    ALIVE,
    OUTSIDE,
    Integers,
    Layers,
    NotRegularError,
    Part,
    Segment,
    Sweeps,
    structure_of,
)
from lowmem_ft.virtual_gpu.trace import Trace
from lowmem_ft.virtual_gpu.work import Work


class GrowingSize(NamedTuple):
    """An allocation's bytes in the short trace, and those that each further period adds."""

    size_bytes: int
    more_bytes: int


class GrowingWork(NamedTuple):
    """The work behind a birth where it grows: entries that get larger, or entries that are put in.

    Args:
        costs: bytes and operations of each entry in the short trace.
        more: bytes and operations that each further period adds to them.
        added: entries that each further period adds, by the number of the entry before which they come.
    """

    costs: tuple[tuple[int, int], ...]
    more: tuple[tuple[int, int], ...] = ()
    added: tuple[tuple[int, tuple[Work, ...]], ...] = ()

    def grown(self, entries: Sequence[Work], extra: int) -> list[Work]:
        """The work of a model with so many further periods."""
        if self.more:
            return [
                dataclasses.replace(
                    entry, num_bytes=entry.num_bytes + extra * num_bytes, flops=entry.flops + extra * flops
                )
                for entry, (num_bytes, flops) in zip(entries, self.more, strict=True)
            ]
        result, done = [], 0
        for position, added in self.added:
            result += [*entries[done:position], *(added * extra)]
            done = position
        return [*result, *entries[done:]]


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """What two traces have shown of a program: how any number of layers follows from the shorter one.

    It holds for other traces of the same structure too, where nothing that grows is of another size.

    Args:
        layers: how they repeat.
        structure: of the short trace, see :func:`~lowmem_ft.virtual_gpu.replay.sweeps.structure_of`.
        is_relative: for each birth, whether the layer in whose turn it dies is as far from its own in every copy.
        is_from_end: whether that layer is as far from the last one.
        sizes: of births that are larger in deeper models.
        work: behind births where there is more of it in deeper models.
        parameters: that a period has, and those of them that are trained.
    """

    layers: Layers
    structure: str
    is_relative: NDArray[np.bool_]
    is_from_end: NDArray[np.bool_]
    sizes: Mapping[int, GrowingSize]
    work: Mapping[int, GrowingWork]
    parameters: tuple[int, int]

    def holds_for(self, short: Trace) -> bool:
        """Whether another short trace differs from the one that this was shown with only where it may."""
        if structure_of(short) != self.structure:
            return False
        allocations = short.timeline.allocations
        if any(allocations[birth].size_bytes != size.size_bytes for birth, size in self.sizes.items()):
            return False
        sweeps = Sweeps.of(short, self.layers)
        return all(_costs(_work_behind(sweeps, birth)) == work.costs for birth, work in self.work.items())

    def extend(self, short: Trace, num_layers: int) -> Trace:
        """The trace of a model of ``num_layers`` layers.

        Args:
            short: one that this holds for.
            num_layers: its own plus a multiple of the period.

        Returns:
            The trace. Frees between two allocations are in the order of birth.

        Raises:
            NotRegularError: if an allocation would die where there is nothing.
        """
        sweeps = Sweeps.of(short, self.layers)
        return self._extended(sweeps, self._extra(sweeps, num_layers)).trace(sweeps, self)

    def refuse_depth(self, short: Trace, num_layers: int) -> None:
        """Raise what :meth:`extend` would raise, without the trace.

        Raises:
            NotRegularError: as there.
        """
        sweeps = Sweeps.of(short, self.layers)
        self._extended(sweeps, self._extra(sweeps, num_layers))

    def _extra(self, sweeps: Sweeps, num_layers: int) -> int:
        extra, rest = divmod(num_layers - sweeps.num_layers, self.layers.period)
        if rest:
            raise NotRegularError("the traces are not some periods apart")
        return extra

    def _extended(self, sweeps: Sweeps, extra: int) -> _Extended:
        turns = list(_turns(sweeps, self.layers, extra))
        lengths = [len(turn.part) for turn in turns]
        source = np.concatenate([np.arange(turn.part.start, turn.part.stop) for turn in turns])
        shift = np.repeat([turn.layer - turn.source for turn in turns], lengths)
        return _Extended(extra, turns, source, shift, self._deaths(sweeps, extra, turns, source, shift))

    def _deaths(
        self, sweeps: Sweeps, extra: int, turns: list[_Turn], source: Integers, shift: Integers
    ) -> Integers:
        """For each birth of the extended model, the one before which it dies."""
        dies_before = sweeps.dies_before[source]
        dies_last = dies_before == len(sweeps.dies_before)
        dies_at_birth = (dies_before != ALIVE) & ~dies_last
        at = dies_before[dies_at_birth]
        places = sweeps.places
        layer = (
            places.layer[at]
            + self.is_from_end[source][dies_at_birth] * extra * self.layers.period
            + self.is_relative[source][dies_at_birth] * shift[dies_at_birth]
        )
        starts = np.full((len(sweeps.segments), sweeps.num_layers + extra * self.layers.period + 1), -1)
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


def extend(short: Trace, longer: Trace, layers: Layers, num_layers: int) -> Trace:
    """The trace of a model of ``num_layers`` layers.

    Args:
        short: of the model with ``n`` layers: the lead and at least three periods.
        longer: of the model with one period more.
        layers: how the layers repeat.
        num_layers: ``n`` plus a multiple of the period.

    Returns:
        The trace. Frees between two allocations are in the order of birth.

    Raises:
        NotRegularError: if the longer trace is not the extended shorter one.
    """
    return prove(short, longer, layers).extend(short, num_layers)


def prove(short: Trace, longer: Trace, layers: Layers) -> Repetition:
    """Show that the layers of a program repeat.

    Args:
        short: of the model with ``n`` layers: the lead and at least three periods.
        longer: of the model with one period more.
        layers: how the layers repeat.

    Returns:
        How deeper models follow.

    Raises:
        NotRegularError: if the longer trace is not the extended shorter one.
    """
    base, proof = Sweeps.of(short, layers), Sweeps.of(longer, layers)
    if proof.num_layers != base.num_layers + layers.period:
        raise NotRegularError("the two traces are not one period apart")
    if len(proof.segments) != len(base.segments):
        raise NotRegularError("the traces pass through the layers differently often")
    partners = _partners(base, proof, layers)
    shown = Repetition(
        layers=layers,
        structure=structure_of(short),
        **_ends_of_lives(base, proof, partners, layers),
        sizes=dict(_growing_sizes(base, proof, partners, layers)),
        work=dict(_growing_work(base, proof, partners, layers)),
        parameters=(
            longer.model.parameters - short.model.parameters,
            longer.model.trainable_parameters - short.model.trainable_parameters,
        ),
    )
    shown._extended(base, 1).refuse_difference(base, proof, shown)
    return shown


class _Turn(NamedTuple):
    """A layer of the extended model (or ``OUTSIDE``), the layer here that it is like, and that one's births."""

    segment: int
    source: int
    layer: int
    part: Part


def _turns(sweeps: Sweeps, layers: Layers, extra: int) -> Iterator[_Turn]:
    """The turns of a model in which the repeated period stands ``extra`` times more, in order."""
    shift = extra * layers.period
    for number, segment in enumerate(sweeps.segments):
        if not segment.is_sweep:
            yield _Turn(number, OUTSIDE, OUTSIDE, segment.parts[OUTSIDE])
            continue
        for layer in _visited(segment, layers, shift):
            source = layer
            if max(segment.parts) >= layers.after and layer >= layers.after:
                in_copies = layer < layers.after + shift
                source = layers.pivot + (layer - layers.pivot) % layers.period if in_copies else layer - shift
            if source not in segment.parts:
                raise NotRegularError(f"layer {layer} has nothing to be copied from")
            yield _Turn(number, source, layer, segment.parts[source])


def _visited(segment: Segment, layers: Layers, shift: int) -> Sequence[int]:
    first, last = min(segment.parts), max(segment.parts)
    if layers.pivot < first < layers.after <= last:
        raise NotRegularError("a pass through the layers begins in the middle")
    visited = range(first, last + 1)
    if last >= layers.after:
        visited = range(first if first < layers.after else first + shift, last + shift + 1)
    return visited if segment.goes_up else visited[::-1]


@dataclass(frozen=True)
class _Extended:
    """A deeper model: for each birth the one here that it is like, how many layers on it is, and where it dies."""

    extra: int
    turns: list[_Turn]
    source: Integers
    shift: Integers
    dies_before: Integers

    def allocations(self, sweeps: Sweeps, shown: Repetition) -> list[Allocation]:
        """Those of the extended model."""
        prefix = f"{shown.layers.stack}."
        here = list(sweeps.trace.timeline.allocations)
        for birth, size in shown.sizes.items():
            here[birth] = dataclasses.replace(
                here[birth], size_bytes=size.size_bytes + self.extra * size.more_bytes
            )
        result: list[Allocation] = []
        for turn in self.turns:
            part = here[turn.part.start : turn.part.stop]
            if turn.layer != turn.source:
                old, new = f"{prefix}{turn.source}", f"{prefix}{turn.layer}"
                part = [_renumbered(allocation, old, new) for allocation in part]
            result += part
        return result

    def work_behind(self, sweeps: Sweeps, shown: Repetition) -> list[list[Work]]:
        """The work behind each birth of the shallow model, as that of the extended one has it."""
        starts, entries = sweeps.work_starts, sweeps.trace.work
        behind = [entries[start:stop] for start, stop in itertools.pairwise(starts)]
        for birth, growing in shown.work.items():
            behind[birth] = growing.grown(behind[birth], self.extra)
        return behind

    def refuse_difference(self, sweeps: Sweeps, real: Sweeps, shown: Repetition) -> None:
        """Against a real one: the same births with the same sizes, purposes, deaths and work."""
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
                and list(map(_cost, work)) == list(map(_cost, rest))
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
        """The extended model's trace."""
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
        # What a birth is followed by comes after the deaths that follow it, too.
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
    )


# --- what two traces show ---------------------------------------------------------------------------------------------


def _partners(base: Sweeps, proof: Sweeps, layers: Layers) -> Integers:
    """For each birth, the one of the longer trace that it is like; -1 if that trace has no such turn."""
    partners = np.full(len(base.dies_before), -1)
    for segment, other in zip(base.segments, proof.segments, strict=True):
        for layer, part in segment.parts.items():
            twin = other.parts.get(layer if layer < layers.after else layer + layers.period)
            if twin is None:
                continue
            if len(twin) != len(part):
                raise NotRegularError(f"layer {layer} does something else in a deeper model")
            partners[part.start : part.stop] = np.arange(twin.start, twin.stop)
    return partners


def _ends_of_lives(
    base: Sweeps, proof: Sweeps, partners: Integers, layers: Layers
) -> dict[str, NDArray[np.bool_]]:
    """By what the layer in whose turn a birth dies goes, where there are more layers."""
    num_births = len(base.dies_before)
    is_relative, is_from_end = np.zeros(num_births, bool), np.zeros(num_births, bool)
    here, there = base.places, proof.places
    for birth in np.flatnonzero((base.dies_before != ALIVE) & (base.dies_before < num_births)).tolist():
        death = base.dies_before[birth]
        dies_in, source = int(here.layer[death]), int(here.layer[birth])
        if dies_in == OUTSIDE:
            continue
        goes_with_the_end = False
        partner = partners[birth]
        if 0 <= source < layers.after and partner >= 0:
            other = proof.dies_before[partner]
            goes_with_the_end = other != ALIVE and (
                (there.segment[other], there.layer[other], there.ordinal[other])
                == (here.segment[death], dies_in + layers.period, here.ordinal[death])
            )
        if goes_with_the_end:
            is_from_end[birth] = True
        elif _is_met_first(base, birth, layers):
            is_from_end[birth] = dies_in >= layers.after or (
                dies_in >= layers.pivot and not base.segments[here.segment[death]].goes_up
            )
        else:
            is_relative[birth] = True
    return {"is_relative": is_relative, "is_from_end": is_from_end}


def _is_met_first(base: Sweeps, birth: int, layers: Layers) -> bool:
    """Whether a birth dies where a pass meets a layer, whoever's turn that is.

    What goes at one moment for all layers, as a list of their norms does, goes so in the extended model too.
    """
    here, death = base.places, base.dies_before[birth]
    source, segment = int(here.layer[birth]), base.segments[here.segment[birth]]
    if source == OUTSIDE:
        return True
    from_pass_to_pass = (
        here.segment[death] != here.segment[birth]
        and source == segment.last
        and here.layer[death] == base.segments[here.segment[death]].first
    )
    if from_pass_to_pass:
        return True
    likes = segment.parts.get(source + layers.period) or segment.parts.get(source - layers.period) or range(0)
    ordinal = int(here.ordinal[birth])
    return ordinal < len(likes) and base.dies_before[likes[ordinal]] == death


def _growing_births(base: Sweeps, partners: Integers, layers: Layers) -> Iterator[tuple[int, int]]:
    """Births that are not copied, and those of the longer trace that they are like."""
    for birth, (layer, partner) in enumerate(
        zip(base.places.layer.tolist(), partners.tolist(), strict=False)
    ):
        if partner >= 0 and not layers.is_repeated(layer):
            yield birth, partner


def _growing_sizes(
    base: Sweeps, proof: Sweeps, partners: Integers, layers: Layers
) -> Iterator[tuple[int, GrowingSize]]:
    here, there = base.trace.timeline.allocations, proof.trace.timeline.allocations
    for birth, partner in _growing_births(base, partners, layers):
        size, more = here[birth].size_bytes, there[partner].size_bytes
        if size != more:
            yield birth, GrowingSize(size, more - size)


def _growing_work(
    base: Sweeps, proof: Sweeps, partners: Integers, layers: Layers
) -> Iterator[tuple[int, GrowingWork]]:
    for birth, partner in _growing_births(base, partners, layers):
        work, longer = _work_behind(base, birth), _work_behind(proof, partner)
        if list(map(_cost, work)) == list(map(_cost, longer)):
            continue
        if [entry.name for entry in work] == [entry.name for entry in longer]:
            more = tuple(
                (by.num_bytes - entry.num_bytes, by.flops - entry.flops)
                for entry, by in zip(work, longer, strict=True)
            )
            yield birth, GrowingWork(_costs(work), more)
        else:
            yield birth, GrowingWork(_costs(work), added=tuple(_added_work(work, longer)))


def _added_work(work: list[Work], longer: list[Work]) -> Iterator[tuple[int, tuple[Work, ...]]]:
    matches = difflib.SequenceMatcher(None, [*map(_cost, work)], [*map(_cost, longer)], autojunk=False)
    for kind, first, _, longer_first, longer_last in matches.get_opcodes():
        if kind not in ("equal", "insert"):
            raise NotRegularError("the work outside the layers changes with their number")
        if kind == "insert":
            yield first, tuple(longer[longer_first:longer_last])


def _work_behind(sweeps: Sweeps, birth: int) -> list[Work]:
    return sweeps.trace.work[sweeps.work_starts[birth] : sweeps.work_starts[birth + 1]]


def _cost(entry: Work) -> tuple[object, ...]:
    return entry.kind, entry.name, entry.flops, entry.num_bytes, entry.stream


def _costs(entries: Sequence[Work]) -> tuple[tuple[int, int], ...]:
    return tuple((entry.num_bytes, entry.flops) for entry in entries)
