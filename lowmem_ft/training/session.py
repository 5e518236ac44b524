"""Everything one optimizer step works on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from lowmem_ft.handle import Handle
from lowmem_ft.techniques.precision import LostUpdateMeter
from lowmem_ft.training.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Session:
    """A built model with its optimizer, ready for :func:`lowmem_ft.training.step.train_step`.

    Args:
        model: what the step calls: the causal LM, wrapped for data parallelism where there are several processes.
        unwrapped_model: the causal LM itself, for saving.
        optimizer: what the step calls; holds the trainable parameters.
        unwrapped_optimizer: the optimizer without Accelerate's wrapper, for its state.
        scheduler: sets the learning rate; advances with every applied step.
        runtime: device, precision and processes.
        max_grad_norm: the global norm to clip to; None measures it and clips nothing.
        chunked_loss: whether the model's forward takes ``num_label_tokens`` (see ``techniques/chunked_loss.py``).
        lost_updates: counts the updates that half-precision weights round away; None where there are none to lose.
        handles: the techniques switched on, in that order.
    """

    model: nn.Module
    unwrapped_model: PreTrainedModel
    optimizer: torch.optim.Optimizer
    unwrapped_optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    runtime: Runtime
    max_grad_norm: float | None
    chunked_loss: bool
    lost_updates: LostUpdateMeter | None
    handles: tuple[Handle, ...]

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer holds, in its order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def close(self) -> None:
        """Take every technique off again: what is left is the plain model."""
        for handle in reversed(self.handles):
            handle.remove()
