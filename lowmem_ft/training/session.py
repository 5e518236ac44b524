"""Everything one optimizer step works on."""

from __future__ import annotations

import contextlib
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem_ft.handle import Handle
from lowmem_ft.memory.host_memory import HostMemory
from lowmem_ft.models import save_model, save_tokenizer
from lowmem_ft.techniques.adapters.lora import Lora
from lowmem_ft.techniques.optimizer_in_backward import InBackward
from lowmem_ft.techniques.optimizer_offload import OptimizerOffload
from lowmem_ft.techniques.precision import LostUpdateMeter
from lowmem_ft.techniques.streaming.parameter_streaming import ParameterStreaming
from lowmem_ft.training.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class Session:
    """A built model with its optimizer, ready for :func:`lowmem_ft.training.step.train_step`.

    Args:
        model: what the step calls: the causal LM, wrapped for data parallelism where there are several processes.
        unwrapped_model: the causal LM itself, for saving.
        adapter: the adapters in the model, which are then all that is trained and saved; None without.
        optimizer: what the step calls; holds the trainable parameters.
        unwrapped_optimizer: the optimizer without Accelerate's wrapper, for its state.
        scheduler: sets the learning rate; advances with every applied step.
        runtime: device, precision and processes.
        max_grad_norm: the global norm to clip to; None measures it and clips nothing.
        chunked_loss: whether the model's forward takes ``num_label_tokens`` (see ``techniques/loss/chunked_loss.py``).
        lost_updates: counts the updates that half-precision weights round away; None where there are none to lose.
        handles: the techniques switched on, in that order.
        host_memory: what waits on the host, by category.
        vertical: whether the model takes all micro-batches of a step at once (``techniques/vertical_accumulation.py``).
        in_backward: who takes the gradients while backward runs; None if they wait for the optimizer's step.
        streaming: brings the weights to the device in turn; None if they are there.
    """

    model: nn.Module
    unwrapped_model: PreTrainedModel
    adapter: Lora | None
    optimizer: torch.optim.Optimizer
    unwrapped_optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    runtime: Runtime
    max_grad_norm: float | None
    chunked_loss: bool
    lost_updates: LostUpdateMeter | None
    handles: tuple[Handle, ...]
    host_memory: HostMemory
    vertical: bool = False
    in_backward: InBackward | None = None
    streaming: ParameterStreaming | None = None

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer holds, in its order."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def clip_grad_norm(self) -> torch.Tensor:
        """The global gradient norm; gradients are scaled down to ``max_grad_norm``, now or when they are applied."""
        if self.in_backward is not None:
            return self.in_backward.clip(self.runtime.unscale)
        max_norm = math.inf if self.max_grad_norm is None else self.max_grad_norm
        return self.runtime.clip_grad_norm(self.trainable_parameters(), max_norm)

    def update_weights(self, *, finite: bool) -> None:
        """Apply the gradients if they are finite, and let the fp16 loss scale move on."""
        if self.in_backward is None:
            self.runtime.update_weights(self.optimizer, finite=finite)
        else:
            self.in_backward.finish(finite=finite)
            self.runtime.update_loss_scale()

    def flush(self) -> None:
        """Make every update that waits, so that weights and state are those after the last step."""
        if self.streaming is not None:
            self.streaming.flush()  # each layer's while it visits
        if self.in_backward is not None:
            self.in_backward.flush()
        for handle in self.handles:
            if isinstance(handle, OptimizerOffload):
                handle.synchronize()

    def at_rest(self) -> AbstractContextManager[None]:
        """Every weight where it can be read and set, in a ``with`` block: streamed ones in host memory."""
        self.flush()
        return contextlib.nullcontext() if self.streaming is None else self.streaming.at_rest()

    def save(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write what is trained, and the tokenizer, as vanilla libraries load it: a model folder, or PEFT's adapters.

        Raises:
            CheckpointError: if the folder, read back, does not hold it.
        """
        with self.at_rest():
            if self.adapter is None:
                save_model(self.unwrapped_model, tokenizer, folder)
            else:
                self.adapter.save(folder)
                save_tokenizer(tokenizer, folder)

    def close(self) -> None:
        """Take every technique off again: what is left is what was trained, the plain model with its adapter if any."""
        self.flush()
        self.unwrapped_optimizer.state.clear()  # or what waits on the host would come back to a device too small for it
        for handle in reversed(self.handles):
            handle.remove()
