"""The session: everything that an optimizer step works on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.techniques.technique import Techniques

if TYPE_CHECKING:
    from lowmem_ft.training.runtimes.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class ForwardSession:
    """A built model without an optimizer: all that an evaluation and an answer need.

    Args:
        model: the model that is called: the causal LM, wrapped for data parallelism if there are several processes.
        unwrapped_model: the causal LM itself, for saving.
        runtime: device, precision and processes.
        techniques: the enabled techniques.
        host_memory: the tensors that are kept on the host, by category.
    """

    model: nn.Module
    unwrapped_model: PreTrainedModel
    runtime: Runtime
    techniques: Techniques
    host_memory: HostMemory


@dataclass(frozen=True, kw_only=True)
class Session(ForwardSession):
    """A built model with its optimizer, ready for :func:`lowmem_ft.training.step.step.train_step`.

    Args:
        optimizer: the optimizer that the step calls; holds the trainable parameters and their state.
        scheduler: sets the learning rate; advances with every applied step.
        max_grad_norm: the global norm to clip to; None measures it and clips nothing.
    """

    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    max_grad_norm: float | None

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer holds, in its order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def clip_grad_norm(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the global gradient norm; scale gradients down to ``max_grad_norm``, now or when they are applied.

        Args:
            loss: loss of the window, 0-d.
        """
        norm = self.techniques.clip_grad_norm(self.runtime.machine.loss_scale.unscale)
        if norm is not None:
            return norm
        max_norm = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return self.runtime.machine.clip_grad_norm(self.optimizer, max_norm, loss)

    def update_weights(self, is_finite: Callable[[], bool]) -> None:
        """Apply the gradients if they are finite, and update the fp16 loss scale."""
        if self.techniques.update_weights(is_finite):
            self.runtime.machine.loss_scale.update()
        else:
            self.runtime.machine.update_weights(self.optimizer, is_finite)

    def close(self) -> None:
        """Remove every technique; the plain trained model is left, with its adapter if there is one."""
        self.techniques.flush()
        self.optimizer.state.clear()  # else state kept on the host would return to a device too small for it
        Handle(*(technique.remove for technique in self.techniques if not technique.is_trained)).remove()
