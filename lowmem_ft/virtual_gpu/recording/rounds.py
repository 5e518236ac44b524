"""How often to count what a program does in the loops that a trace does only a few rounds of."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lowmem_ft.virtual_gpu.recording.work import WorkLog

T = TypeVar("T")

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"

_AROUND_ONE = 1, 1
"""Rounds that are done before and after the one that stands for others."""

_AROUND_ONE_READ_AHEAD = 2, 3
"""The same where items are made for another loop, which may read two of them ahead: what its rounds do for later items,
and wait for in earlier ones, is then done for alike items."""


@dataclass(frozen=True, eq=False)
class Round:
    """One round of a loop.

    Args:
        times: how many rounds it stands for, those of loops around it included.
        loop: number of the loop.
        around: the round that the loop is in; None for the whole program.
    """

    times: int = 1
    loop: int = -1
    around: Round | None = None

    @property
    def path(self) -> list[Round]:
        """The rounds it is in, from the outermost to itself."""
        return [] if self.around is None else [*self.around.path, self]


class AlikeRounds:
    """The loops of ``repetition.rounds``: which rounds are done, and how many each stands for.

    Work on an item may go on after its round. A backward pass counts as its forward did: autograd's nodes carry the
    sequence number they were born with. Items that come again count as they did before, together with all that is done
    until the next one is there: with what an iterator that reads ahead does for later items, each round is whole.

    Args:
        work: where rounds begin and end is logged.
    """

    def __init__(self, work: WorkLog) -> None:
        self._work = work
        self._program = Round()
        self._round = self._program  # of what is made now
        self._open: list[Round] = []  # of what is done now
        self._is_making = 0
        self._num_loops = 0
        self._loops = itertools.count()
        self._round_of_item: MutableMapping[Any, Round] = WeakIdKeyDictionary()
        self._round_of_node: dict[int, Round] = {}
        self._last_sequence = 0

    @property
    def times(self) -> int:
        """How many rounds what is done now stands for."""
        return self._open[-1].times if self._open else 1

    def rounds(self, items: Iterable[T]) -> Iterator[T]:
        """The first of a sequence, the second for all up to the last, and the last; all of an iterator.

        Where another loop is given the items: the first two, the third for all up to the last three, and these.
        """
        self.operator_begins()
        around = self._round
        self._num_loops += 1
        try:
            chosen = self._chosen(items) if isinstance(items, Sequence) else self._again(items)
            for item, its_round in chosen:
                self._become(its_round)
                yield item
        finally:
            self._become(around)
            self._num_loops -= 1

    def operator_begins(self) -> None:
        """Find out which round the program is in; called before each operator and each event."""
        if self._num_loops:
            return
        if torch._C._current_graph_task_id() == -1:
            self._become(self._program)
            return
        self._learn_nodes()
        if self._round_of_node:
            node: Any = torch._C._current_autograd_node()
            # A sum of gradients belongs to the node that ran before.
            if node is not None and node.name() != _ACCUMULATE_GRAD:
                self._become(self._round_of_node.get(node._sequence_nr(), self._program))

    def _chosen(self, items: Sequence[T]) -> Iterator[tuple[T, Round]]:
        around, loop = self._round, next(self._loops)
        num_before, num_after = _AROUND_ONE
        for index in range(len(items)):
            if index == 1 and self._is_making:
                num_before, num_after = _AROUND_ONE_READ_AHEAD
            if num_before < index < len(items) - num_after:
                continue
            item, its_round = items[index], around
            if len(items) > sum(_AROUND_ONE) + 1:
                num_alike = len(items) - num_before - num_after
                times = max(1, num_alike) if index == num_before else 1
                its_round = Round(around.times * times, loop, around)
            if type(item).__weakrefoffset__:  # not a number, which is the same in every loop
                self._round_of_item[item] = its_round
            yield item, its_round

    def _again(self, items: Iterable[T]) -> Iterator[tuple[T, Round]]:
        around, iterator = self._round, iter(items)
        while True:
            with self._making(around):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item, self._round_of_item.get(item, around)

    @contextlib.contextmanager
    def _making(self, around: Round) -> Iterator[None]:
        """Loops in this block make items for a loop in ``around``, whose present round all their work belongs to."""
        self._become(around, is_done_in=False)
        self._is_making += 1
        try:
            yield
        finally:
            self._is_making -= 1

    def _become(self, its_round: Round, *, is_done_in: bool = True) -> None:
        if its_round is not self._round:
            self._learn_nodes()
            self._round = its_round
        if is_done_in and not self._is_making:
            self._log(its_round.path)

    def _log(self, path: list[Round]) -> None:
        """Let the rounds of a path be those that are open in the log."""
        while self._open and self._open[-1] not in path:
            self._open.pop()
            self._work.end_round()
        for opened in path[len(self._open) :]:
            self._open.append(opened)
            self._work.begin_round(opened.loop, opened.times)

    def _learn_nodes(self) -> None:
        """Those made since the last call belong to the present round."""
        now = torch.autograd._get_sequence_nr()
        if self._round is not self._program:
            self._round_of_node.update(dict.fromkeys(range(self._last_sequence, now), self._round))
        self._last_sequence = now
