"""Proof from two short traces that a program's layers repeat, and how deeper models follow.

The shorter trace, extended by a period, must be the longer one, event for event: the same births with the same sizes,
deaths, purposes and work. Where layers repeat in several stretches, the longer trace has one more period of each.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.replay.depth.layer_extrapolation import (
    GrowingSize,
    GrowingWork,
    Repetition,
    cost_of,
    costs_of,
    work_behind,
)
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import (
    ALIVE,
    OUTSIDE,
    Integers,
    Layers,
    NotRegularError,
    Sweeps,
    structure_of,
)


def extend(short: Trace, longer: Trace, layers: Layers, more: Sequence[int]) -> Trace:
    """Return the trace of a deeper model.

    Args:
        short: trace of the model with ``n`` layers: the lead and at least three periods.
        longer: trace of the model with one more period of each stretch.
        layers: how the layers repeat.
        more: periods that each stretch gets beyond the shorter trace.

    Returns:
        The trace. Frees between two allocations are in the order of birth.

    Raises:
        NotRegularError: if the longer trace is not the extended shorter one.
    """
    return prove(short, longer, layers).extend(short, more)


def prove(short: Trace, longer: Trace, layers: Layers) -> Repetition:
    """Prove that the layers of a program repeat.

    Args:
        short: trace of the model with ``n`` layers: the lead and at least three periods.
        longer: trace of the model with one more period of each stretch.
        layers: how the layers repeat.

    Returns:
        How deeper models follow.

    Raises:
        NotRegularError: if the longer trace is not the extended shorter one.
    """
    base, proof = Sweeps.of(short, layers), Sweeps.of(longer, layers)
    once_more = (1,) * len(layers.pivots)
    if proof.num_layers != base.num_layers + layers.period * len(once_more):
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
            _each(longer.model.parameters - short.model.parameters, layers),
            _each(longer.model.trainable_parameters - short.model.trainable_parameters, layers),
        ),
    )
    shown.extended(base, once_more).refuse_difference(base, proof, shown)
    return shown


def _each(growth: int, layers: Layers) -> int:
    """Return one period's share of the growth by a period of each stretch: equal, as all have the same weights.

    Raises:
        NotRegularError: if the shares cannot be equal.
    """
    share, rest = divmod(growth, len(layers.pivots))
    if rest:
        raise NotRegularError("what lies outside the layers grows differently with those at the end")
    return share


def _partners(base: Sweeps, proof: Sweeps, layers: Layers) -> Integers:
    """Return, for each birth, its equivalent in the longer trace; -1 if that trace has no such turn."""
    partners = np.full(len(base.dies_before), -1)
    once_more = (1,) * len(layers.pivots)
    for segment, other in zip(base.segments, proof.segments, strict=True):
        for layer, part in segment.parts.items():
            twin = other.parts.get(layers.moved(layer, once_more))
            if twin is None:
                continue
            if len(twin) != len(part):
                raise NotRegularError(f"layer {layer} does something else in a deeper model")
            partners[part.start : part.stop] = np.arange(twin.start, twin.stop)
    return partners


def _ends_of_lives(
    base: Sweeps, proof: Sweeps, partners: Integers, layers: Layers
) -> dict[str, NDArray[np.bool_]]:
    """Find out what the layer in whose turn a birth dies moves with, if there are more layers."""
    num_births = len(base.dies_before)
    is_relative, goes_with = np.zeros(num_births, bool), np.zeros((num_births, len(layers.pivots)), bool)
    here = base.places
    for birth in np.flatnonzero((base.dies_before != ALIVE) & (base.dies_before < num_births)).tolist():
        death = base.dies_before[birth]
        dies_in, source = int(here.layer[death]), int(here.layer[birth])
        if dies_in == OUTSIDE:
            continue
        num_passed = None
        if partners[birth] >= 0:
            num_passed = _stretches_passed(
                base, proof, int(death), int(proof.dies_before[partners[birth]]), layers
            )
        if num_passed is not None and (
            not layers.is_repeated(source) or num_passed > sum(source >= after for after in layers.afters)
        ):
            goes_with[birth, :num_passed] = True
        elif _is_met_first(base, birth, layers):
            goes_up = base.segments[here.segment[death]].goes_up
            goes_with[birth] = [
                dies_in >= after or (dies_in >= pivot and not goes_up)
                for pivot, after in zip(layers.pivots, layers.afters, strict=True)
            ]
        else:
            is_relative[birth] = True
    return {"is_relative": is_relative, "goes_with": goes_with}


def _stretches_passed(base: Sweeps, proof: Sweeps, death: int, other: int, layers: Layers) -> int | None:
    """Return how many stretches, each a period longer, precede a death; None if it is at another place."""
    here, there = base.places, proof.places
    if other == ALIVE or (there.segment[other], there.ordinal[other]) != (
        here.segment[death],
        here.ordinal[death],
    ):
        return None
    passed, rest = divmod(int(there.layer[other] - here.layer[death]), layers.period)
    return passed if not rest and 0 <= passed <= len(layers.pivots) else None


def _is_met_first(base: Sweeps, birth: int, layers: Layers) -> bool:
    """Return whether a birth dies where a pass reaches a layer, whichever birth's turn that is.

    Allocations that die at one moment for all layers, as a list of their norms does, do so in the extended model too.
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
    """Yield births that are not copied, with their equivalents in the longer trace."""
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
        one, other = here[birth], there[partner]
        if one.asked_bytes and other.asked_bytes:
            more_bytes = other.asked_bytes - one.asked_bytes
        else:
            more_bytes = other.size_bytes - one.size_bytes
        if more_bytes:
            yield birth, GrowingSize(one.size_bytes, _each(more_bytes, layers), one.asked_bytes)


def _growing_work(
    base: Sweeps, proof: Sweeps, partners: Integers, layers: Layers
) -> Iterator[tuple[int, GrowingWork]]:
    for birth, partner in _growing_births(base, partners, layers):
        work, longer = work_behind(base, birth), work_behind(proof, partner)
        if list(map(cost_of, work)) == list(map(cost_of, longer)):
            continue
        if [entry.name for entry in work] == [entry.name for entry in longer]:
            more = tuple(
                (
                    _each(by.num_bytes - entry.num_bytes, layers),
                    _each(by.flops - entry.flops, layers),
                    (by.launches - entry.launches) / len(layers.pivots),
                )
                for entry, by in zip(work, longer, strict=True)
            )
            yield birth, GrowingWork(costs_of(work), more)
        else:
            yield birth, GrowingWork(costs_of(work), added=tuple(_added_work(work, longer, layers)))


def _added_work(
    work: list[Work], longer: list[Work], layers: Layers
) -> Sequence[tuple[int, tuple[Work, ...]]]:
    """Return the entries that a period adds, and the index of the entry before which they come."""
    stretches = len(layers.pivots)
    here, there = [*map(cost_of, work)], [*map(cost_of, longer)]
    num_added, start = len(longer) - len(work), _num_equal(here, there)
    share = num_added // stretches
    if (
        here[start:] == there[start + num_added :]
        and there[start:][:num_added] == there[start:][:share] * stretches
    ):
        return [(start, tuple(longer[start : start + share]))]  # in one place, for each stretch the same
    matches = difflib.SequenceMatcher(None, here, there, autojunk=False)
    inserted: list[tuple[int, tuple[Work, ...]]] = []
    for kind, first, _, longer_first, longer_last in matches.get_opcodes():
        if kind not in ("equal", "insert"):
            raise NotRegularError("the work outside the layers changes with their number")
        if kind == "insert":
            inserted.append((first, tuple(longer[longer_first:longer_last])))
    if any(
        len(entries) % stretches for _, entries in inserted
    ):  # those of one stretch, then those of the other
        return inserted[: _each(len(inserted), layers)]
    return [(first, entries[: len(entries) // stretches]) for first, entries in inserted]


def _num_equal(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many entries at the beginning are equal."""
    return next(
        (index for index, (here, there) in enumerate(zip(one, other, strict=False)) if here != there),
        min(len(one), len(other)),
    )
