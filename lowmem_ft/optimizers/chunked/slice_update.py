"""The update of a gradient slice, and of each of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lowmem_ft.optimizers.formats.state_formats import StateFormat
from lowmem_ft.optimizers.triton.triton_update import Launches, NamesInKernel
from lowmem_ft.optimizers.updates.update_rule import Step


@dataclass(frozen=True)
class Layout:
    """All of a parameter's update that is the same in every step. It keeps no tensor alive.

    Args:
        made_from: types, formats and averages that it follows from.
        averages: the format of each running average by name.
        in_kernel: the same for the Triton kernel.
    """

    made_from: object
    averages: Mapping[str, StateFormat]
    in_kernel: NamesInKernel


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
    in_kernel: Launches | None = None
    after: list[Callable[[], None]] = field(default_factory=list)

    @property
    def stop(self) -> int:
        """The element after the last."""
        return self.start + self.gradient.numel()


@dataclass(eq=False)
class ChunkUpdate:
    """The update of one chunk of a slice.

    Args:
        update: the slice's update.
        start: the chunk's first element in the flattened parameter.
        stop: the one after its last.
        here: its state on the device, during the visit.
    """

    update: SliceUpdate
    start: int
    stop: int
    here: Mapping[str, Tensor] = field(default_factory=dict)

    def gradient(self) -> Tensor:
        """Return the gradient in float32, scaled."""
        given, scale = self.gradient_as_it_is(), self.update.scale
        gradient = given.float()
        if scale is None:
            return gradient
        return gradient * scale if gradient is given else gradient.mul_(scale)

    def gradient_as_it_is(self) -> Tensor:
        """Return the gradient in its own type, not scaled; a view."""
        update = self.update
        return update.gradient[self.start - update.start : self.stop - update.start]
