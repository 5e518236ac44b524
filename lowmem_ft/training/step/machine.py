"""The hardware of a step: its device, mixed precision with fp16's loss scale, and host memory for offloading."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.devices import kernels_of, of_tensors, refuse_other_makers, with_index
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.host.mapped_files import MappedFiles
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.foundation.virtual_device import refuse_after_virtual_gpu
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.techniques.gradients.norm import clip_factor, clip_grad_norm, grad_norm
from lowmem_ft.training.step.budget_cap import THIS_HOST, Host
from lowmem_ft.training.step.loss_scaling import LossScale

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_TWO_TYPES = re.compile(
    r"(index_\w+|put)_\(\): self |Index put requires the source and destination dtypes match"
)
"""Torch's error for an indexed write of another type: autocast does not cast such values."""


@dataclass(frozen=True)
class Sent:
    """Values on their way to the host, and the end of the copy; None: they are read from the device."""

    values: Tensor
    end: torch.Event | None = None


class Machine:
    """The device of a step, its mixed precision, and its host.

    Args:
        device: the device of the step; Accelerate gives a single process ``cuda`` without an index.
        mixed_precision: ``training.mixed_precision``: ``no``, ``bf16`` or ``fp16``.
        num_processes_here: the processes of the run that share this host.
        host: source of the host memory readings that are compared with budgets.

    Attributes:
        device: the same device, with the index that its tensors have.
        loss_scale: the loss scale of fp16; without effect otherwise.

    Raises:
        UserError: if the device is another maker's, or a real GPU and this process has had a virtual one.
    """

    def __init__(
        self,
        device: torch.device,
        mixed_precision: str = "no",
        *,
        num_processes_here: int = 1,
        host: Host = THIS_HOST,
    ) -> None:
        refuse_other_makers(device)
        refuse_after_virtual_gpu(device)
        self.device = with_index(device)
        self.mixed_precision = mixed_precision
        self.num_processes_here = num_processes_here
        self.host = host
        scaler = torch.amp.GradScaler(device.type) if mixed_precision == "fp16" else None  # type: ignore[attr-defined]
        self.loss_scale = LossScale(scaler)

    def autocast(self) -> AbstractContextManager[None]:
        """Return the autocast context of a forward pass; outputs are not cast back."""
        dtype = _AUTOCAST_DTYPES.get(self.mixed_precision)
        if dtype is None:
            return contextlib.nullcontext()
        # With the cache, a half-precision copy of every weight lives until the forward pass ends, although
        # checkpointing needs only one layer's at a time. Each weight is used once per pass: there is nothing to cache.
        return torch.autocast(self.device.type, dtype, cache_enabled=False)  # type: ignore[return-value]

    def backward(self, loss: Tensor) -> None:
        """Call ``loss.backward()``, with the loss multiplied by the loss scale under fp16."""
        scaler = self.loss_scale.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, max_norm: float, loss: Tensor) -> Tensor:
        """Unscale fp16 gradients, and clip them, at once or in the next step.

        Our optimizer applies the factor as it reads gradients (``ChunkedOptimizer.gradient_factor``): there ``.grad``
        stays as it is. For other optimizers :func:`lowmem_ft.techniques.gradients.norm.clip_grad_norm` scales it, and
        for 32-bit gradients that no kernel reads: the bits are the same, without a scaled copy of each chunk.

        Args:
            optimizer: holds the parameters.
            max_norm: the limit; infinity only measures.
            loss: loss of the window, 0-d; if it or the norm is not finite, the factor is NaN.

        Returns:
            The global norm before clipping; 0-d, float32.
        """
        if self.loss_scale.scaler is not None:
            self.loss_scale.scaler.unscale_(optimizer)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
        if not isinstance(optimizer, ChunkedOptimizer):
            return clip_grad_norm(parameters, max_norm)
        in_kernel = optimizer.may_use_kernel(of_tensors(self.device))
        if not in_kernel and (max_norm == math.inf or all(each.dtype.itemsize >= 4 for each in gradients)):
            return clip_grad_norm(parameters, max_norm)
        norm = grad_norm(parameters)
        nan_or_zero = (torch.stack((norm, loss.to(norm))) * 0).sum()
        optimizer.gradient_factor = clip_factor(norm, max_norm) + nan_or_zero
        return norm

    def update_weights(self, optimizer: torch.optim.Optimizer, is_finite: Callable[[], bool]) -> None:
        """Step the optimizer if gradients are finite; update the fp16 loss scale in any case.

        Args:
            optimizer: our own launches its kernels before it asks.
            is_finite: returns whether they are, and may wait for the device.
        """
        scaler = self.loss_scale.scaler
        if scaler is None and isinstance(optimizer, ChunkedOptimizer):
            optimizer.is_finite = is_finite
            optimizer.step()
        elif is_finite():
            optimizer.step() if scaler is None else scaler.step(optimizer)
        elif isinstance(optimizer, ChunkedOptimizer):
            optimizer.gradient_factor = None
        self.loss_scale.update()

    def abandon_step(self) -> None:
        """Discard the scaler's record of unscaled gradients; keep the scale."""
        scale = self.loss_scale.state()
        if scale is not None:
            self.loss_scale = LossScale(torch.amp.GradScaler(self.device.type))  # type: ignore[attr-defined]
            self.loss_scale.load_state(scale)

    def send(self, *values: Tensor) -> Sent:
        """Begin to copy the values of 0-d tensors to the host, which does not wait where CUDA copies."""
        stacked = torch.stack([value.float() for value in values])
        if kernels_of(stacked.device) != "cuda":
            return Sent(stacked)
        on_host = torch.empty_like(stacked, device="cpu", pin_memory=True).copy_(stacked, non_blocking=True)
        end = torch.get_device_module(stacked.device).Event()
        end.record()
        return Sent(on_host, end)

    def fetch(self, sent: Sent) -> tuple[float, ...]:
        """Return the values that were sent: the one point of a step where the host waits for the device."""
        if sent.end is not None:
            sent.end.synchronize()
        return tuple(sent.values.tolist())

    def host_memory(self, budget: Budget, folder: str | None) -> HostMemory:
        """Return memory for offloaded tensors, most of them in files of ``folder`` if given.

        It is limited by the machine, its container, ``budget.host`` and the disk of ``folder``.
        """
        return HostMemory(
            self.device,
            budget_bytes=budget.host_bytes(self.num_processes_here),
            files=None if folder is None else MappedFiles(expand_user(folder)),
        )


@contextlib.contextmanager
def one_type_needed(model_class: str, mixed_precision: str) -> Iterator[None]:
    """Explain torch's error if a forward pass writes autocast's results into a tensor of another type.

    Args:
        model_class: the model's class.
        mixed_precision: ``training.mixed_precision``.

    Raises:
        ModelError: instead of torch's error, with the settings to change.
    """
    try:
        yield
    except RuntimeError as error:
        if mixed_precision == "no" or _TWO_TYPES.match(str(error)) is None:
            raise
        raise ModelError(
            f"training.mixed_precision={mixed_precision} needs a model that casts values before an indexed write, "
            f"but {model_class} does not: {error}. Set training.mixed_precision=no, with model.dtype=bfloat16 for "
            "16-bit matrix products."
        ) from error
