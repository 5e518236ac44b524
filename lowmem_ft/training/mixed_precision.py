"""Autocast and the fp16 loss scale: the effect of ``training.mixed_precision`` on a step, real or traced."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.devices import with_index
from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.techniques.gradients.norm import clip_grad_norm
from lowmem_ft.training.loss_scaling import unscale

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

_TWO_TYPES = re.compile(
    r"(index_\w+|put)_\(\): self |Index put requires the source and destination dtypes match"
)
"""Torch's words about a write by index, which autocast does not cast."""


class MixedPrecision:
    """The methods of a :class:`lowmem_ft.training.runtime.Runtime` that depend on precision; runtimes inherit them.

    Args:
        name: ``no``, ``bf16`` or ``fp16``.
        device: the device of the step; Accelerate gives a single process ``cuda`` without an index.

    Attributes:
        device: the same device, with the index that its tensors have.
        scaler: holds the loss scale; None unless fp16.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.mixed_precision = name
        self.device = with_index(device)
        self.scaler: torch.amp.GradScaler | None = None  # type: ignore[attr-defined]
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device.type)  # type: ignore[attr-defined]

    def autocast(self) -> AbstractContextManager[None]:
        """Return autocast for a forward pass; outputs keep the type in which they are computed."""
        dtype = _AUTOCAST_DTYPES.get(self.mixed_precision)
        if dtype is None:
            return contextlib.nullcontext()
        # With the cache, a half-precision copy of every weight lives until the forward pass ends, although
        # checkpointing needs only one layer's at a time. Each weight is used once per pass: there is nothing to cache.
        return torch.autocast(self.device.type, dtype, cache_enabled=False)  # type: ignore[return-value]

    def backward(self, loss: Tensor) -> None:
        """Call ``loss.backward()``, with the loss multiplied by the loss scale under fp16."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def clip_grad_norm(self, optimizer: torch.optim.Optimizer, max_norm: float) -> Tensor:
        """Unscale fp16 gradients, then call :func:`lowmem_ft.techniques.gradients.norm.clip_grad_norm`."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        return clip_grad_norm((p for group in optimizer.param_groups for p in group["params"]), max_norm)

    def unscale(self, values: Tensor) -> None:
        """Unscale values with torch's ``GradScaler`` under fp16; see ``loss_scaling.py``."""
        if self.scaler is not None:
            unscale(self.scaler, values)

    def loss_scale_may_overflow(self) -> bool:
        """Return True under fp16 while the scale is at least 1: below that the gradients overflow by themselves."""
        return self.scaler is not None and self.scaler.get_scale() >= 1

    def update_weights(self, optimizer: torch.optim.Optimizer, *, finite: bool) -> None:
        """Step if finite; the fp16 loss scale is updated in any case, by what the scaler found while unscaling."""
        if finite:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        self.update_loss_scale()

    def abandon_step(self) -> None:
        """Discard the scaler's record of unscaled gradients; keep the scale."""
        if self.scaler is not None:
            scale = self.scaler.state_dict()
            self.scaler = torch.amp.GradScaler(self.device.type)  # type: ignore[attr-defined]
            self.scaler.load_state_dict(scale)

    def update_loss_scale(self) -> None:
        """Update the loss scale by what the scaler found while unscaling."""
        if self.scaler is not None:
            self.scaler.update()

    def loss_scale_state(self) -> dict[str, Any] | None:
        """Return the state of the ``GradScaler``; None without one."""
        return None if self.scaler is None else self.scaler.state_dict()

    def load_loss_scale_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the ``GradScaler``, if there is one."""
        if self.scaler is not None:
            self.scaler.load_state_dict(state)


@contextlib.contextmanager
def one_type_needed(model_class: str, mixed_precision: str) -> Iterator[None]:
    """Explain the error of a forward that writes the results of autocast into a tensor of another type.

    Args:
        model_class: the model's class.
        mixed_precision: that of the run.

    Raises:
        ModelError: in place of torch's error.
    """
    try:
        yield
    except RuntimeError as error:
        if mixed_precision == "no" or _TWO_TYPES.match(str(error)) is None:
            raise
        raise ModelError(
            f"training.mixed_precision={mixed_precision} needs a model whose forward casts what it writes by index; "
            f"that of {model_class} does not: {error}. Set training.mixed_precision=no, and model.dtype=bfloat16 for "
            "products in 16 bits."
        ) from error
