"""The trace of a deep model from that of a shallow one, where it is exact.

Decoder layers repeat, and so does what they allocate. A trace is cut into *sweeps*: stretches in which the program goes
through the layers one after the other, up (forward, the optimizer over its parameters) or down (backward). In each
sweep the part of one layer is copied for the layers that are missing. What an allocation lives until is kept relative:
an activation that dies in the backward part of its own layer does so in every copy.

Whether the program really is that regular is not taken on trust: :func:`extend` gets two short traces, and the shorter
one, extended, must be the longer one, event for event. What lies outside all layers and grows with their number (a
stack of all gradients' norms) grows linearly.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from lowmem_ft.memory.timeline import Allocation, Timeline
from lowmem_ft.virtual_gpu.trace import Trace
from lowmem_ft.virtual_gpu.work import Work


class NotRegularError(Exception):
    """The traces do not repeat layer by layer; trace the whole model instead."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """How a stack of layers repeats.

    Args:
        stack: qualified name of the list of layers, such as ``model.layers``.
        lead: layers at the beginning that are unlike the rest.
        period: layers after which the rest repeats.
    """

    stack: str
    lead: int
    period: int


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
    base, proof = _Cut.of(short, layers), _Cut.of(longer, layers)
    extra = (num_layers - base.num_layers) // layers.period
    if proof.num_layers != base.num_layers + layers.period or (num_layers - base.num_layers) % layers.period:
        raise NotRegularError("the two traces are not one period apart")
    _refuse_difference(base.extended(1, proof), proof)
    grown = base.extended(extra, proof)
    return grown.trace(short, longer, extra)


Anchor = tuple[int, int, int]
"""Where an allocation is born: segment, layer (-1 outside layers), ordinal in the layer's part of the segment."""


@dataclass
class _Birth:
    """One allocation: what it is, the birth before which it dies (None: it lives on), and the work that follows it."""

    allocation: Allocation
    dies_before: Anchor | None = None
    work: list[Work] = field(default_factory=list)


@dataclass
class _Segment:
    """Either births outside the layers (under layer -1), or a sweep: the births of each layer, in order of visit."""

    parts: dict[int, list[_Birth]]

    @property
    def is_sweep(self) -> bool:
        return -1 not in self.parts

    @property
    def goes_up(self) -> bool:
        layers = list(self.parts)
        return layers[0] < layers[-1]


class _Turn(NamedTuple):
    """A layer of the extended model (-1: outside layers), the layer here that it is like, and the segment."""

    segment: int
    source: int
    layer: int


@dataclass
class _Cut:
    """A timeline as segments; ``first_work`` is what comes before the first birth."""

    segments: list[_Segment]
    first_work: list[Work]
    layers: Layers
    num_layers: int

    @classmethod
    def of(cls, trace: Trace, layers: Layers) -> _Cut:
        if any(kind == "empty_cache" for kind, _ in trace.timeline.events):
            raise NotRegularError("the cache is emptied on the way")
        allocations = trace.timeline.allocations
        labels = _without_gaps(_labels(allocations, layers.stack), allocations)
        if max(labels, default=-1) < layers.lead + 2 * layers.period:
            raise NotRegularError("too few layers")
        segments: list[_Segment] = []
        anchors: list[Anchor] = []
        births: list[_Birth] = []
        for allocation, label in zip(allocations, labels, strict=True):
            if not segments or not _continues(segments[-1], label):
                segments.append(_Segment({}))
            part = segments[-1].parts.setdefault(label, [])
            anchors.append((len(segments) - 1, label, len(part)))
            births.append(_Birth(allocation))
            part.append(births[-1])
        first_work = _attach_deaths_and_work(trace, births, anchors)
        return cls(segments, first_work, layers, max(labels) + 1)

    @property
    def pivot(self) -> int:
        """The first layer of the period that is repeated: the second period, as the first one may be at an edge."""
        return self.layers.lead + self.layers.period

    def extended(self, extra: int, proof: _Cut) -> _Cut:
        """With the pivot's period repeated; all else grows as it does from here to ``proof``."""
        if len(proof.segments) != len(self.segments):
            raise NotRegularError("the traces pass through the layers differently often")
        segments = [
            self._extended_sweep(number, other, extra)
            if segment.is_sweep
            else _Segment(
                {-1: self._part(segment.parts[-1], other.parts.get(-1), _Turn(number, -1, -1), extra)}
            )
            for number, (segment, other) in enumerate(zip(self.segments, proof.segments, strict=True))
        ]
        return _Cut(segments, self.first_work, self.layers, self.num_layers + extra * self.layers.period)

    def _extended_sweep(self, number: int, proof: _Segment, extra: int) -> _Segment:
        segment = self.segments[number]
        first, last = min(segment.parts), max(segment.parts)
        after = self.pivot + self.layers.period
        if first < after <= last and first > self.pivot:
            raise NotRegularError("a pass through the layers begins in the middle")
        if last < after:
            layers = range(first, last + 1)
        else:
            shift = extra * self.layers.period
            layers = range(first if first < after else first + shift, last + shift + 1)
        parts: dict[int, list[_Birth]] = {}
        for layer in layers if segment.goes_up else reversed(layers):
            source = self._source(layer, extra) if last >= after else layer
            longer = proof.parts.get(source if source < after else source + self.layers.period)
            turn = _Turn(number, source, layer)
            parts[layer] = self._part(segment.parts.get(source), longer, turn, extra)
        return _Segment(parts)

    def _part(
        self, births: list[_Birth] | None, longer: list[_Birth] | None, at: _Turn, extra: int
    ) -> list[_Birth]:
        """The births of one layer's turn, or of what is outside the layers, as the extended model has them."""
        if births is None or (longer is not None and len(births) != len(longer)):
            raise NotRegularError(f"layer {at.layer} has nothing to be copied from")
        if longer is None:
            return [self._moved(birth, None, ordinal, at, extra) for ordinal, birth in enumerate(births)]
        is_repeated = 0 <= at.source - self.pivot < self.layers.period
        return [
            self._moved(birth if is_repeated else _grown(birth, by, extra), by, ordinal, at, extra)
            for ordinal, (birth, by) in enumerate(zip(births, longer, strict=True))
        ]

    def _source(self, layer: int, extra: int) -> int:
        """The layer here that a layer of the extended model is like."""
        period = self.layers.period
        if layer < self.pivot + period:
            return layer
        if layer < self.pivot + period * (extra + 1):
            return self.pivot + (layer - self.pivot) % period
        return layer - period * extra

    def _moved(self, birth: _Birth, by: _Birth | None, ordinal: int, at: _Turn, extra: int) -> _Birth:
        """A birth as a layer of the extended model has it; ``by`` is the same birth in the longer trace."""
        allocation = birth.allocation
        if at.layer != at.source:
            module = _renumbered(allocation.module, self.layers.stack, at.source, at.layer)
            allocation = dataclasses.replace(allocation, module=module)
        dies_before = birth.dies_before
        if dies_before is not None and dies_before[1] >= 0:
            number, dies_in, death_ordinal = dies_before
            layer = self._layer_of_death(birth, ordinal, at, extra)
            is_before_repetition = 0 <= at.source < self.pivot + self.layers.period
            if (
                is_before_repetition
                and by
                and by.dies_before == (number, dies_in + self.layers.period, death_ordinal)
            ):
                layer = dies_in + extra * self.layers.period  # as far from the last layer as here
            dies_before = (number, layer, death_ordinal)
        return _Birth(allocation, dies_before, birth.work)

    def _layer_of_death(self, birth: _Birth, ordinal: int, at: _Turn, extra: int) -> int:
        """The layer in whose turn a birth of the extended model dies: as far from its own as here.

        What goes at one moment for all layers, as a list of their norms does, goes so in the extended model too.
        """
        assert birth.dies_before is not None
        number, dies_in, _ = birth.dies_before
        from_pass_to_pass = (
            number != at.segment
            and at.source == list(self.segments[at.segment].parts)[-1]
            and dies_in == next(iter(self.segments[number].parts))
        )
        if at.source < 0 or from_pass_to_pass or self._dies_with_its_like(birth, ordinal, at):
            return self._met_first(number, dies_in, extra)
        return dies_in + at.layer - at.source

    def _dies_with_its_like(self, birth: _Birth, ordinal: int, at: _Turn) -> bool:
        """Whether the same birth of a layer one period on dies at the same moment, whoever's turn that is."""
        parts = self.segments[at.segment].parts
        likes = parts.get(at.source + self.layers.period) or parts.get(at.source - self.layers.period) or []
        return ordinal < len(likes) and likes[ordinal].dies_before == birth.dies_before

    def _met_first(self, number: int, layer: int, extra: int) -> int:
        """The layer of the extended model that a pass meets where it meets a layer here, whoever else is meant."""
        shift = self.layers.period * extra
        if layer < self.pivot:
            return layer
        if layer >= self.pivot + self.layers.period:
            return layer + shift
        return layer if self.segments[number].goes_up else layer + shift

    def trace(self, short: Trace, longer: Trace, extra: int) -> Trace:
        """The segments as a timeline and a log of work again."""
        births = [birth for segment in self.segments for part in segment.parts.values() for birth in part]
        index_of = {
            (number, layer, ordinal): index for index, (number, layer, ordinal) in enumerate(self._anchors())
        }
        deaths: dict[int, list[int]] = {}
        for index, birth in enumerate(births):
            if birth.dies_before is not None:
                try:
                    deaths.setdefault(index_of[birth.dies_before], []).append(index)
                except KeyError as error:
                    raise NotRegularError(
                        "an allocation dies where the extended trace has nothing"
                    ) from error
        timeline = Timeline()
        work: list[Work] = []
        pending = self.first_work  # what a birth is followed by comes after the deaths that follow it, too
        for index in range(len(births) + 1):
            for dead in deaths.get(index, ()):
                if dead >= index:
                    raise NotRegularError("an allocation dies before it is born")
                timeline.free(dead)
            position = len(timeline.events)
            work += [entry.at(position) for entry in pending]
            if index < len(births):
                timeline.malloc(births[index].allocation)
                pending = births[index].work
        grown = longer.model.parameters - short.model.parameters
        grown_trainable = longer.model.trainable_parameters - short.model.trainable_parameters
        model = dataclasses.replace(
            short.model,
            parameters=short.model.parameters + extra * grown,
            trainable_parameters=short.model.trainable_parameters + extra * grown_trainable,
        )
        return dataclasses.replace(short, timeline=timeline, work=work, model=model)

    def _anchors(self) -> Iterator[Anchor]:
        for number, segment in enumerate(self.segments):
            for layer, part in segment.parts.items():
                for ordinal in range(len(part)):
                    yield number, layer, ordinal
        yield _END


_END: Anchor = (-1, -1, -1)
"""The death of what is freed after the last birth."""


def _labels(allocations: Sequence[Allocation], stack: str) -> list[int]:
    """The layer of each allocation, -1 outside layers."""
    pattern = re.compile(re.escape(stack) + r"\.(\d+)(?:\.|$)")
    labels: dict[str, int] = {}
    for allocation in allocations:
        if allocation.module not in labels:
            match = pattern.match(allocation.module)
            labels[allocation.module] = int(match[1]) if match else -1
    return [labels[allocation.module] for allocation in allocations]


def _without_gaps(labels: list[int], allocations: Sequence[Allocation]) -> list[int]:
    """What is allocated between two neighbouring layers goes with the first of them, as it repeats too.

    So does what is allocated within one layer's turn; between two turns of a layer, as between the forward pass and
    the backward pass of the last one, the phase changes.
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


def _continues(segment: _Segment, label: int) -> bool:
    """Whether a birth of that layer belongs to a segment: to the last layer of a sweep, or to the one after it."""
    if (label < 0) != (not segment.is_sweep):
        return False
    visited = list(segment.parts)
    if label < 0 or label == visited[-1]:
        return True
    step = label - visited[-1]
    return abs(step) == 1 and (len(visited) == 1 or step == visited[-1] - visited[-2])


def _attach_deaths_and_work(trace: Trace, births: list[_Birth], anchors: list[Anchor]) -> list[Work]:
    """Deaths as the birth that follows them, work as the birth before it; the work before all births is returned."""
    events = trace.timeline.events
    num_born, born_at = 0, [0] * (len(events) + 1)
    for position, (kind, index) in enumerate(events):
        if kind == "malloc":
            num_born += 1
        else:
            births[index].dies_before = anchors[num_born] if num_born < len(anchors) else _END
        born_at[position + 1] = num_born
    first_work: list[Work] = []
    for entry in trace.work:
        index = born_at[entry.position] - 1
        (births[index].work if index >= 0 else first_work).append(entry)
    return first_work


def _renumbered(module: str, stack: str, source: int, layer: int) -> str:
    prefix = f"{stack}.{source}"
    if module == prefix or module.startswith(f"{prefix}."):
        return f"{stack}.{layer}{module[len(prefix) :]}"
    return module


def _grown(birth: _Birth, other: _Birth, extra: int) -> _Birth:
    """A birth whose size went up from one trace to the next goes up so with every period added."""
    size, more = birth.allocation.size_bytes, other.allocation.size_bytes
    allocation = birth.allocation
    if size != more:
        allocation = dataclasses.replace(allocation, size_bytes=size + extra * (more - size))
    return _Birth(allocation, birth.dies_before, _grown_work(birth.work, other.work, extra))


def _grown_work(work: list[Work], longer: list[Work], extra: int) -> list[Work]:
    """Work that went up likewise: one entry that gets larger, or more entries of the same kind."""
    if [entry.name for entry in work] == [entry.name for entry in longer]:
        return [
            dataclasses.replace(
                entry,
                num_bytes=entry.num_bytes + extra * (by.num_bytes - entry.num_bytes),
                flops=entry.flops + extra * (by.flops - entry.flops),
            )
            for entry, by in zip(work, longer, strict=True)
        ]
    grown: list[Work] = []
    added: list[Work] = []
    matches = difflib.SequenceMatcher(None, [*map(_cost, work)], [*map(_cost, longer)], autojunk=False)
    for kind, first, last, longer_first, longer_last in matches.get_opcodes():
        if kind not in ("equal", "insert"):
            raise NotRegularError("the work outside the layers changes with their number")
        grown += work[first:last]
        added = longer[longer_first:longer_last] if kind == "insert" else []
        grown += added * extra
    return grown


def _refuse_difference(extended: _Cut, real: _Cut) -> None:
    """The extended trace against a real one: same births with the same sizes, purposes, deaths and work."""
    for mine, theirs in zip(extended.segments, real.segments, strict=True):
        if list(mine.parts) != list(theirs.parts):
            raise NotRegularError("the traces pass through the layers in different order")
        for layer, part in mine.parts.items():
            other = theirs.parts[layer]
            if len(part) != len(other) or not all(map(_is_same, part, other)):
                what = f"layer {layer}" if layer >= 0 else "what lies outside the layers"
                raise NotRegularError(f"{what} does not repeat")


def _is_same(mine: _Birth, theirs: _Birth) -> bool:
    return (
        mine.allocation == theirs.allocation
        and mine.dies_before == theirs.dies_before
        and [_cost(entry) for entry in mine.work] == [_cost(entry) for entry in theirs.work]
    )


def _cost(entry: Work) -> tuple[object, ...]:
    return entry.kind, entry.name, entry.flops, entry.num_bytes, entry.stream
