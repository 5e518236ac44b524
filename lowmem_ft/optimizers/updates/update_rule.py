"""What makes one optimizer differ from another: one step in float32, on tensors that it may change in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """A chunk of a parameter in float32.

    Args:
        gradient: flat; left as it is.
        averages: the running averages of these elements by name.
        start: number of the first element in the flattened parameter.
    """

    gradient: Tensor
    averages: Mapping[str, Tensor]
    start: int


@dataclass(frozen=True)
class Chunks:
    """A parameter's chunks, in order, each time that they are iterated over; changes in them are not kept.

    Args:
        count: how many they are; a trace reads a few of them.
        device: where they are read.
        read: begins a reading.
    """

    count: int
    device: torch.device
    read: Callable[[], Iterator[Chunk]]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Chunk]:
        return self.read()


Step = Callable[[Tensor, Chunk], None]
"""Takes the weights of a chunk in float32 and the chunk; updates weights and averages in place."""


class UpdateRule(Protocol):
    """A rule that updates each element by itself."""

    def averages(self, shape: torch.Size, hyperparameters: Mapping[str, Any]) -> dict[str, bool]:
        """The running averages of a parameter, one element each: by name, whether they have signs."""
        ...

    def step(self, number: int, hyperparameters: Mapping[str, Any]) -> Step:
        """The update of one parameter's chunks in its step ``number``, from 1."""
        ...


@runtime_checkable
class WholeParameterRule(Protocol):
    """A rule whose step depends on the whole gradient of a parameter, which it reads first."""

    def averages(self, shape: torch.Size, hyperparameters: Mapping[str, Any]) -> dict[str, bool]:
        """The running averages of a parameter, one element each: by name, whether they have signs."""
        ...

    def statistics(self, shape: torch.Size) -> dict[str, int]:
        """Lengths of small tensors that a parameter keeps beside them, in float32 and on its device."""
        ...

    def row_length(self, shape: torch.Size) -> int:
        """Chunks are made of whole rows of so many elements."""
        ...

    def measured_step(
        self,
        shape: torch.Size,
        chunks: Chunks,
        statistics: Mapping[str, Tensor],
        number: int,
        hyperparameters: Mapping[str, Any],
    ) -> Step:
        """Update the statistics from the whole gradient; the update of the parameter's chunks that follows from them.

        Args:
            shape: the parameter's.
            chunks: of the parameter, to be read as often as it takes. A reading leaves behind nothing that grows with
                their number.
            statistics: as :meth:`statistics` named them; updated in place.
            number: of the step, from 1.
            hyperparameters: the group's.
        """
        ...
