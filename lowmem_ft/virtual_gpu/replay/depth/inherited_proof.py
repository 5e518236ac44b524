"""Proofs for another trace of the same model that differs only where the number of layers plays no part.

Another number of micro-batches, or another number of chunks of the loss, changes what a program does before, between
and after its passes through the layers, and nothing in them. What two traces have proved then holds for it too, if

- it passes through the layers as often and does the same in every layer's turn,
- what grows with their number lies where both traces do the same, and has the same size,
- what it does elsewhere belongs to a batch or to a module outside the layers, such as the head, and not to what sees
  all weights, as the optimizer's step does.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from dataclasses import dataclass

import numpy as np

from lowmem_ft.foundation.memory.timeline import Allocation
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.replay.depth.layer_extrapolation import Repetition, work_behind
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import (
    ALIVE,
    OUTSIDE,
    Integers,
    Layers,
    NotRegularError,
    Part,
    Sweeps,
    structure_of,
)

_SEES_NO_OTHER_WEIGHTS = frozenset({"load", "forward", "backward", "evaluation"})
"""Phases in which a module works with its own weights alone."""


@dataclass(frozen=True, kw_only=True)
class Outline:
    """Outline of a trace: everything that its births do, without their bytes.

    Args:
        segments: the layers that each segment visits, in order; ``OUTSIDE`` alone for births outside the layers.
        parts: the births of each segment.
        does: for each birth, a number that is equal for births that do the same.
        is_free: for each birth, whether another trace may have more like it, or fewer.
    """

    segments: list[tuple[int, ...]]
    parts: list[Part]
    does: Integers
    is_free: list[bool]

    @classmethod
    def of(cls, trace: Trace, layers: Layers) -> Outline:
        """Return the outline of a short trace.

        Raises:
            NotRegularError: as :meth:`Sweeps.of`.
        """
        sweeps = Sweeps.of(trace, layers)
        num_births, places = len(sweeps.dies_before), sweeps.places
        segment_at, layer_at, ordinal_at = (
            places.segment.tolist(),
            places.layer.tolist(),
            places.ordinal.tolist(),
        )
        before_forward = _before_first_forward(trace)
        does, is_free = [], []
        for birth, (one, death) in enumerate(
            zip(trace.timeline.allocations, sweeps.dies_before.tolist(), strict=True)
        ):
            is_outside = death in (ALIVE, num_births) or layer_at[death] == OUTSIDE
            end = (
                (
                    min(death, 0),
                    segment_at[death],
                )  # which of the births outside: that differs with their number
                if is_outside
                else (segment_at[death], layer_at[death], ordinal_at[death])
            )
            work = work_behind(sweeps, birth)
            does.append(hash((_kind_of(one), end, tuple(map(_kind_of_work, work)))))
            sees_one_module = birth in before_forward or _is_of_batch_or_module(one)
            is_free.append(is_outside and sees_one_module and not any(map(_takes_a_list, work)))
        parts = [
            range(min(p.start for p in s.parts.values()), max(p.stop for p in s.parts.values()))
            for s in sweeps.segments
        ]
        return cls(
            segments=[tuple(segment.parts) for segment in sweeps.segments],
            parts=parts,
            does=np.array(does, np.int64),
            is_free=is_free,
        )


def outline_of(trace: Trace, layers: Layers) -> Outline | None:
    """Return the outline of a trace; None if it cannot be cut into its passes through the layers."""
    try:
        return Outline.of(trace, layers)
    except NotRegularError:
        return None


def inherit(shown: Repetition, proved: Outline, outline: Outline | None, short: Trace) -> Repetition | None:
    """Return how a trace's layers repeat, by what was proved for another one; None if that does not tell.

    Args:
        shown: the proof.
        proved: the outline of the trace for which it was made.
        outline: that of the other trace, see :func:`outline_of`.
        short: the other trace, of as many layers of the same model.
    """
    if outline is None or outline.segments != proved.segments:
        return None
    growing = np.zeros(len(proved.does), bool)
    growing[[*shown.sizes, *shown.work]] = True
    partners = np.full(len(outline.does), -1)
    for visited, part, other in zip(outline.segments, outline.parts, proved.parts, strict=True):
        here, there = outline.does[part.start : part.stop], proved.does[other.start : other.stop]
        if np.array_equal(here, there):
            partners[part.start : part.stop] = np.arange(other.start, other.stop)
            continue
        if visited != (OUTSIDE,):
            return None
        for kind, *ends in _changes(there, here):
            old_start, old_stop, start, stop = (
                end + shift
                for end, shift in zip(ends, (other.start, other.start, part.start, part.start), strict=True)
            )
            if kind == "equal":
                partners[start:stop] = np.arange(old_start, old_stop)
            elif growing[old_start:old_stop].any() or not all(
                (*outline.is_free[start:stop], *proved.is_free[old_start:old_stop])
            ):
                return None
    is_known = partners >= 0
    births = {int(partner): birth for birth, partner in enumerate(partners) if partner >= 0}
    inherited = dataclasses.replace(
        shown,
        structure=structure_of(short),
        is_relative=shown.is_relative[partners] & is_known,
        goes_with=shown.goes_with[partners] & is_known[:, None],
        sizes={births[birth]: size for birth, size in shown.sizes.items()},
        work={births[birth]: work for birth, work in shown.work.items()},
    )
    return inherited if inherited.holds_for(short) else None


def _kind_of(one: Allocation) -> tuple[object, ...]:
    has_bytes = one.size_bytes > 0 or one.place == "pinned"
    return one.category, one.phase, one.module, one.stream, one.place, has_bytes, one.asked_bytes > 0


def _kind_of_work(entry: Work) -> tuple[object, ...]:
    return entry.kind, entry.stream, entry.name, entry.event >= 0, entry.blocking, entry.to_host


def _before_first_forward(trace: Trace) -> set[int]:
    """Return the births between the begin of a step or micro-batch and the first forward pass: those of its batch."""
    found: set[int] = set()
    events, allocations = trace.timeline.events, trace.timeline.allocations
    for start in [*trace.between_steps, *(trace.work[begin].position for begin, _ in trace.micro_batches)]:
        for kind, index in itertools.islice(events, start, None):
            if allocations[index].phase not in ("load", "optimizer_step"):
                break
            if kind == "malloc":
                found.add(index)
    return found


def _is_of_batch_or_module(one: Allocation) -> bool:
    is_of_batch = (
        one.category == "input" or one.place == "host" or (one.phase == "forward" and not one.module)
    )
    return one.phase in _SEES_NO_OTHER_WEIGHTS and (is_of_batch or bool(one.module))


def _takes_a_list(entry: Work) -> bool:
    return entry.name.startswith("_foreach") or entry.kind not in ("kernel", "mark", "copy")


def _changes(one: Integers, other: Integers) -> list[tuple[str, int, int, int, int]]:
    """Return the ranges that two sequences share, and those in which they differ, as ``difflib`` does."""
    shared = min(len(one), len(other))
    begin = _num_equal(one, other)
    end = min(_num_equal(one[::-1], other[::-1]), shared - begin)
    inner, inner_of_other = one[begin : len(one) - end].tolist(), other[begin : len(other) - end].tolist()
    matches = difflib.SequenceMatcher(None, inner, inner_of_other, autojunk=False)
    return [
        ("equal", 0, begin, 0, begin),
        *((kind, a + begin, b + begin, c + begin, d + begin) for kind, a, b, c, d in matches.get_opcodes()),
        ("equal", len(one) - end, len(one), len(other) - end, len(other)),
    ]


def _num_equal(one: Integers, other: Integers) -> int:
    """Return how many entries at the beginning are equal."""
    shared = min(len(one), len(other))
    differ = np.flatnonzero(one[:shared] != other[:shared])
    return int(differ[0]) if len(differ) else shared
