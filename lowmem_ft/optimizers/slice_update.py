"""The update of a gradient slice, and of each of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lowmem_ft.optimizers.update_rule import Step


@dataclass
class SliceUpdate:
    """The update of one slice of a parameter."""

    parameter: nn.Parameter
    weight: Tensor
    gradient: Tensor
    start: int
    scale: Tensor | None
    number: int
    hyperparameters: Mapping[str, Any]
    step: Step = field(init=False)
    after: list[Callable[[], None]] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + self.gradient.numel()


@dataclass(eq=False)
class ChunkUpdate:
    """The update of one chunk of a slice.

    Args:
        update: the slice's.
        start: its first element in the flattened parameter.
        stop: the one after its last.
        here: what is kept of it, on the device, while it visits.
    """

    update: SliceUpdate
    start: int
    stop: int
    here: Mapping[str, Tensor] = field(default_factory=dict)

    def gradient(self) -> Tensor:
        """In float32, scaled."""
        update = self.update
        gradient = update.gradient[self.start - update.start : self.stop - update.start].float()
        return gradient if update.scale is None else gradient * update.scale
