"""How often to count what a program does in the loops that a trace does only a few rounds of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakIdKeyDictionary

T = TypeVar("T")

_ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"


class AlikeRounds:
    """The loops of ``repetition.rounds``: which rounds are done, and how many each stands for.

    Work on an item may go on after its round. A backward pass counts as its forward did: autograd's nodes carry the
    sequence number they were born with. Items that come again count as they did before.

    Attributes:
        times: how many rounds what is done now stands for.
    """

    def __init__(self) -> None:
        self.times = 1
        self._num_loops = 0
        self._times_of_item: MutableMapping[Any, int] = WeakIdKeyDictionary()
        self._times_of_node: dict[int, int] = {}
        self._last_sequence = 0

    def rounds(self, items: Iterable[T]) -> Iterator[T]:
        """The first, the second for all up to the last, and the last of a sequence; all of an iterator."""
        self.operator_begins()
        before = self.times
        self._num_loops += 1
        try:
            for item, times in (
                self._first_second_last(items) if isinstance(items, Sequence) else self._again(items)
            ):
                self._become(times)
                yield item
        finally:
            self._become(before)
            self._num_loops -= 1

    def operator_begins(self) -> None:
        """Find out which round the program is in; called before each operator."""
        if self._num_loops:
            return
        if torch._C._current_graph_task_id() == -1:
            self._become(1)
            return
        self._learn_nodes()
        if self._times_of_node:
            node: Any = torch._C._current_autograd_node()
            # A sum of gradients belongs to the node that ran before.
            if node is not None and node.name() != _ACCUMULATE_GRAD:
                self._become(self._times_of_node.get(node._sequence_nr(), 1))

    def _first_second_last(self, items: Sequence[T]) -> Iterator[tuple[T, int]]:
        times, num_alike = self.times, len(items) - 2
        if len(items) <= 3:
            counted = [(item, times) for item in items]
        else:
            counted = [(items[0], times), (items[1], times * num_alike), (items[-1], times)]
        for item, count in counted:
            if type(item).__weakrefoffset__:  # not a number, which is the same in every loop
                self._times_of_item[item] = count
        yield from counted

    def _again(self, items: Iterable[T]) -> Iterator[tuple[T, int]]:
        times = self.times
        for item in items:
            yield item, self._times_of_item.get(item, times)

    def _become(self, times: int) -> None:
        if times != self.times:
            self._learn_nodes()
            self.times = times

    def _learn_nodes(self) -> None:
        """Those made since the last call count as what is done now."""
        now = torch.autograd._get_sequence_nr()
        if self.times != 1:
            self._times_of_node.update(dict.fromkeys(range(self._last_sequence, now), self.times))
        self._last_sequence = now
