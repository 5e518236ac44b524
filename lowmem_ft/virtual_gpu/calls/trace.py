"""A program's use of a machine, recorded: enough to replay it on any GPU of the same kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.foundation.memory.memory_estimate import ModelSize
from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.virtual_gpu.calls.work import (
    BETWEEN_STEPS,
    FOREIGN_BEGIN,
    FOREIGN_END,
    MICRO_BATCH_BEGIN,
    MICRO_BATCH_END,
    ROUND_BEGIN,
    ROUND_END,
    STEP_END,
    Work,
)


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Memory and work of a program, in order.

    Args:
        timeline: every allocation.
        work: every kernel and copy; marks separate steps and micro-batches.
        model: the model that was placed.
        is_quantized: whether some of its weights are held in 4 or 8 bits.
        choices: decisions made while tracing.
        assumed_largest: operators whose result was assumed at its largest, as its size depends on values.
        uncertain_bytes: the most bytes at once whose sizes a library decides and does not tell; a run may have twice as
            many.
        does_routing_decide: whether sizes follow from what routers of mixtures of experts pick.
    """

    timeline: Timeline
    work: list[Work]
    model: ModelSize
    is_quantized: bool = False
    choices: tuple[str, ...] = ()
    assumed_largest: tuple[str, ...] = ()
    uncertain_bytes: int = 0
    does_routing_decide: bool = False

    @cached_property
    def step_ends(self) -> list[int]:
        """For each optimizer step, the index in ``work`` of the entry that ends it."""
        return self._moments(STEP_END)

    @cached_property
    def micro_batches(self) -> list[tuple[int, int]]:
        """For each micro-batch, the indices of the entries at its begin and end; empty if the program marked none."""
        return list(zip(self._moments(MICRO_BATCH_BEGIN), self._moments(MICRO_BATCH_END), strict=True))

    @cached_property
    def between_steps(self) -> list[int]:
        """For each point between two steps, the number of events that the timeline had by then."""
        return [self.work[index].position for index in self._moments(BETWEEN_STEPS)]

    @cached_property
    def foreign(self) -> list[tuple[int, int]]:
        """For each stretch in which another program holds memory, the numbers of events at its begin and its end."""
        begins, ends = (
            [self.work[index].position for index in self._moments(name)]
            for name in (FOREIGN_BEGIN, FOREIGN_END)
        )
        return list(zip_longest(begins, ends, fillvalue=len(self.timeline.events)))

    @cached_property
    def positions(self) -> NDArray[np.int64]:
        """For each entry of ``work``, the number of events that the timeline had by then, shape [number of entries]."""
        return np.array([entry.position for entry in self.work], dtype=np.int64)

    @cached_property
    def repeated(self) -> list[tuple[int, int]]:
        """For each round that represents several, the indices in ``work`` of its begin and its end."""
        found, open_rounds = [], []
        for index, entry in enumerate(self.work):
            if entry.kind == "mark" and entry.name == ROUND_BEGIN:
                open_rounds.append(index)
            elif entry.kind == "mark" and entry.name == ROUND_END:
                begin = open_rounds.pop()
                if self.work[begin].times > 1:
                    found.append((begin, index))
        return found

    def _moments(self, name: str) -> list[int]:
        return [index for index, entry in enumerate(self.work) if entry.kind == "mark" and entry.name == name]
