"""Loops of which a trace runs only a few rounds: the recorded work counts for the skipped rounds, too."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Generator, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lowmem_ft.foundation.tensors.backward_detection import is_in_backward
from lowmem_ft.virtual_gpu.calls.work import WorkLog

T = TypeVar("T")

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"

_AROUND_ONE = 1, 1
"""Rounds that run before and after the one that represents others."""

_AROUND_ONE_READ_AHEAD = 2, 3
"""The same where the items are made for another loop, which may read two of them ahead.

What its rounds do for later items, and wait for in earlier ones, then happens for items that are alike.
"""


@dataclass(frozen=True, eq=False)
class Round:
    """One round of a loop.

    Args:
        times: the number of rounds it represents, those of enclosing loops included.
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
    """The loops of ``repetition.rounds``: which rounds run, and how many each represents.

    Work on an item may continue after its round. A backward pass counts as its forward did: autograd's nodes carry the
    sequence number with which they were created. Items that come again count as before, together with all that runs
    until the next item: so each round is whole, with the work that an iterator which reads ahead does for later items.

    Args:
        work: the log, which receives the begin and end of each round.
    """

    def __init__(self, work: WorkLog) -> None:
        self._work = work
        self._program = Round()
        self._round = self._program  # round of new nodes and items
        self._open: list[Round] = []  # rounds of the running work
        self._is_making = 0
        self._num_loops = 0
        self._loops = itertools.count()
        self._round_of_item: MutableMapping[Any, Round] = WeakIdKeyDictionary()
        self._round_of_node: dict[int, Round] = {}
        self._last_sequence = 0

    @property
    def times(self) -> int:
        """Rounds that the current work represents."""
        return self._open[-1].times if self._open else 1

    def rounds(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the first item of a sequence, the second for all up to the last, and the last; all of an iterator.

        If the items go to another loop: the first two, the third for all up to the last three, and these three.
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

    def standing_for(self, numbers: Iterable[int]) -> Generator[int, None, None]:
        """Yield each number of a sequence in a round of a loop that represents so many rounds; close it at the end."""
        self.operator_begins()
        around, loop = self._round, next(self._loops)
        self._num_loops += 1
        try:
            for times in numbers:
                self._become(around if times == 1 else Round(around.times * times, loop, around))
                yield times
        finally:
            self._become(around)
            self._num_loops -= 1

    def operator_begins(self) -> None:
        """Update the current round; called before each operator and each event."""
        if self._num_loops:
            return
        if not is_in_backward():
            self._become(self._program)
            return
        self._learn_nodes()
        if self._round_of_node:
            node: Any = torch._C._current_autograd_node()
            # The sum of gradients belongs to the node that ran before.
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
        """Mark loops in a block as making items for a loop in ``around``, whose current round gets all their work."""
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
        """Make the rounds of a path the open ones in the log."""
        while self._open and self._open[-1] not in path:
            self._open.pop()
            self._work.end_round()
        for opened in path[len(self._open) :]:
            self._open.append(opened)
            self._work.begin_round(opened.loop, opened.times)

    def _learn_nodes(self) -> None:
        """Attribute autograd nodes made since the last call to the current round."""
        now = torch.autograd._get_sequence_nr()
        if self._round is not self._program:
            self._round_of_node.update(dict.fromkeys(range(self._last_sequence, now), self._round))
        self._last_sequence = now
