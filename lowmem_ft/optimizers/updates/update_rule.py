"""The interface by which optimizers differ: one step in float32, on tensors that it may change in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

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
        count: number of chunks; a trace reads a few of them.
        device: the device to read them on.
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
"""Step that takes the weights of a chunk in float32 and the chunk; it updates weights and averages in place."""


class UpdateRule(Protocol):
    """A rule that updates each element by itself."""

    def averages(self, shape: torch.Size, hyperparameters: Mapping[str, Any]) -> dict[str, bool]:
        """Return the running averages of a parameter, with as many elements: by name, whether they have signs."""
        ...

    def step(self, number: int, hyperparameters: Mapping[str, Any]) -> Step:
        """Return the update of one parameter's chunks in its step ``number``, from 1."""
        ...


class WholeParameterRule(ABC):
    """A rule whose step depends on the whole gradient of a parameter, which it reads first.

    It is a base class because each update asks for it: ``isinstance`` of a protocol takes longer than a kernel launch.
    """

    @abstractmethod
    def averages(self, shape: torch.Size, hyperparameters: Mapping[str, Any]) -> dict[str, bool]:
        """Return the running averages of a parameter, with as many elements: by name, whether they have signs."""

    @abstractmethod
    def statistics(self, shape: torch.Size) -> dict[str, int]:
        """Return lengths of small tensors that a parameter keeps as well, in float32 and on its device."""

    @abstractmethod
    def row_length(self, shape: torch.Size) -> int:
        """Return the number of elements in a row; chunks consist of whole rows."""

    @abstractmethod
    def measured_step(
        self,
        shape: torch.Size,
        chunks: Chunks,
        statistics: Mapping[str, Tensor],
        number: int,
        hyperparameters: Mapping[str, Any],
    ) -> Step:
        """Update the statistics from the whole gradient; return the resulting update of the parameter's chunks.

        Args:
            shape: the parameter's.
            chunks: chunks of the parameter, to be read any number of times. A reading must leave behind nothing that
                grows with their number.
            statistics: named as in :meth:`statistics`; updated in place.
            number: number of the step, from 1.
            hyperparameters: the group's.
        """
