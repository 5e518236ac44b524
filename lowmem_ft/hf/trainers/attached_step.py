"""The end of an optimizer step inside a user's trainer, done as in our own step.

The trainer sums gradients, asks its accelerator for their norm, and steps the optimizer that the accelerator has
prepared. Both are ours here: the norm is exact and in float32, and a step that is not finite changes nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.step.enabled_techniques import EnabledTechniques
from lowmem_ft.training.step.machine import Machine
from lowmem_ft.training.step.outcome import Outcome, PendingOutcome

logger = logging.getLogger(__name__)


class AttachedStep:
    """The loss and norm of a window of micro-batches, and the update that follows.

    Args:
        enabled: the techniques that are on, and the optimizer, which steps on the gradients if none of them does.
        machine: the trainer's device, and its fp16 loss scale.
        ranks: the trainer's processes.
        max_grad_norm: the global norm to clip to; None: the norm is only measured.
        max_skipped_steps: steps in a row that may be skipped.

    Attributes:
        applied: whether the last step changed the weights.
    """

    def __init__(
        self,
        enabled: EnabledTechniques,
        machine: Machine,
        ranks: Ranks,
        *,
        max_grad_norm: float | None,
        max_skipped_steps: int,
    ) -> None:
        self.applied = True
        self._enabled = enabled
        self._machine, self._ranks = machine, ranks
        self._max_norm = math.inf if max_grad_norm is None else max_grad_norm
        self._max_skipped_steps = max_skipped_steps
        self._loss = torch.zeros((), device=machine.device)
        self._pending: PendingOutcome | None = None
        self._skipped_in_a_row = 0

    def add(self, loss: Tensor) -> None:
        """Add a micro-batch's loss, before its backward."""
        self._loss = self._loss + loss.detach().float()

    def backward(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's backward.

        Args:
            is_last: whether it is the last one before the norm is asked for.
        """
        return self._ranks.backward(self._parameters(), is_last=is_last)

    def clip_grad_norm(self, *_: Any, **__: Any) -> Tensor:
        """Clip in place of ``Accelerator.clip_grad_norm_``, whose arguments are not needed.

        A callback that reads ``.grad`` in ``on_pre_optimizer_step`` may see gradients as backward left them, unless the
        optimizer is torch's or bitsandbytes': ours scales them in its step. With ``optimizer.in_backward`` there are
        none.

        Returns:
            The global norm before clipping; 0-d, float32.
        """
        machine = self._machine
        self._ranks.reduce_gradients(self._parameters())
        loss = self._ranks.sum(self._loss)
        norm = self._enabled.techniques.clip_grad_norm(machine.loss_scale.unscale)
        if norm is None:
            norm = machine.clip_grad_norm(self._enabled.optimizer, self._max_norm, loss)
        self._loss, self._pending = torch.zeros_like(loss), PendingOutcome(machine, loss, norm)
        return norm

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self._enabled.optimizer.param_groups for parameter in group["params"])

    def update_weights(self) -> None:
        """Apply the gradients, or discard them if loss or norm is not finite.

        Raises:
            UserError: if too many steps in a row were not finite, or one was that had already changed weights.
        """
        machine = self._machine
        if self._pending is None:
            self.clip_grad_norm()
        pending, self._pending = self._pending, None
        assert pending is not None
        if self._enabled.techniques.update_weights(pending.is_finite):
            machine.loss_scale.update()
        else:
            machine.update_weights(self._enabled.optimizer, pending.is_finite)
        self.applied = pending.is_finite()
        self._count(pending.outcome)

    def _count(self, outcome: Outcome) -> None:
        loss, norm = outcome.loss, outcome.grad_norm
        if outcome.applied:
            self._skipped_in_a_row = 0
            return
        if self._enabled.techniques.updates_at_once:
            raise UserError(
                f"A step was not finite (loss {loss:.4g}, gradient norm {norm:.4g}), and without clipping "
                "optimizer.in_backward had already updated part of the weights: resume from the last checkpoint. Set "
                "max_grad_norm, with which such a step is skipped as a whole, or optimizer.in_backward=false."
            )
        if outcome.overflow:
            logger.info("Step skipped: the fp16 loss scale was too high and is now lower.")
            return
        self._skipped_in_a_row += 1
        logger.warning("Step skipped: loss %.4g, gradient norm %.4g.", loss, norm)
        if self._skipped_in_a_row >= self._max_skipped_steps:
            raise UserError(
                f"The loss or gradient was not finite for {self._skipped_in_a_row} steps in a row "
                "(training.max_skipped_steps): the last finite step may have ruined the weights. Resume from a "
                "checkpoint before that step, with a lower learning rate."
            )


class AttachedOptimizer(AcceleratedOptimizer):
    """The optimizer that the trainer steps and saves: the recipe's, by way of :class:`AttachedStep`.

    Accelerate treats it as already prepared: its own wrapper would send all state through the device.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, attached: AttachedStep) -> None:
        super().__init__(optimizer, device_placement=False, scaler=None)
        self._attached = attached
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        """End a window."""
        if self.gradient_state.sync_gradients:
            self._attached.update_weights()

    @property
    def step_was_skipped(self) -> bool:
        """True if the schedule must not advance."""
        return not self._attached.applied
