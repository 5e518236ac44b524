"""What an update works on: pieces of parameters with finished gradients, and the chunks these are cut into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lowmem_ft.optimizers.update_rule import Step


@dataclass(frozen=True)
class Piece:
    """A part of a parameter with its finished gradient.

    Args:
        parameter: one of the optimizer's.
        gradient: of that part; contiguous, of its shape or flat, of any floating type. The update runs on its device; a
            weight that waits elsewhere visits there with its state.
        start: number of the part's first element in the flattened parameter. See :attr:`ChunkedOptimizer.piece_unit`.
    """

    parameter: nn.Parameter
    gradient: Tensor
    start: int = 0


@dataclass
class Job:
    """The update of one piece."""

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
class Part:
    """One chunk of a job.

    Args:
        job: the update it is of.
        start: its first element in the flattened parameter.
        stop: the one after its last.
        here: what is kept of it, on the device, while it visits.
    """

    job: Job
    start: int
    stop: int
    here: Mapping[str, Tensor] = field(default_factory=dict)

    def gradient(self) -> Tensor:
        """In float32, scaled."""
        job = self.job
        gradient = job.gradient[self.start - job.start : self.stop - job.start].float()
        return gradient if job.scale is None else gradient * job.scale
