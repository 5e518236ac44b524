"""Loss and gradient norm of a step, and what they decide; they may arrive while the host does other work."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from torch import Tensor

from lowmem_ft.training.step.machine import Machine


@dataclass(frozen=True)
class Outcome:
    """Loss and norm of a step, and whether it is applied.

    Args:
        loss: loss of the window.
        grad_norm: global gradient norm before clipping.
        further: values that are logged with them.
        applied: False if loss or norm are not finite, which leaves the weights unchanged.
        overflow: True if only the fp16 loss scale can be the cause; the step lowers it.
    """

    loss: float
    grad_norm: float
    further: tuple[float, ...]
    applied: bool
    overflow: bool


class PendingOutcome:
    """An outcome on its way to the host, behind the work that the device has queued.

    Args:
        machine: has the device, and the fp16 loss scale.
        loss: loss of the window; 0-d, on the device.
        norm: global gradient norm before clipping; likewise.
        further: other 0-d tensors.
    """

    def __init__(self, machine: Machine, loss: Tensor, norm: Tensor, *further: Tensor) -> None:
        self._machine = machine
        self._sent = machine.send(loss, norm, *further)

    def is_finite(self) -> bool:
        """Return whether the step is applied."""
        return self.outcome.applied

    @functools.cached_property
    def outcome(self) -> Outcome:
        """The outcome, for which the host waits; under fp16 it has to be read before the loss scale is updated."""
        loss, norm, *further = self._machine.fetch(self._sent)
        applied = math.isfinite(loss) and math.isfinite(norm)
        overflow = not applied and math.isfinite(loss) and self._machine.loss_scale.may_overflow()
        return Outcome(loss, norm, tuple(further), applied, overflow)
