"""Autocast and the fp16 loss scale: what ``training.mixed_precision`` is to a step, real or traced."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from lowmem_ft.training.loss_scaling import unscale

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class MixedPrecision:
    """One run's precision, and under fp16 its loss scale.

    Args:
        name: ``no``, ``bf16`` or ``fp16``.
        device: where the step computes.

    Attributes:
        scaler: holds the loss scale; None unless fp16.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self._dtype = _AUTOCAST_DTYPES.get(name)
        self.scaler: torch.amp.GradScaler | None = None  # type: ignore[attr-defined]
        if name == "fp16":
            self.scaler = torch.amp.GradScaler(device.type)  # type: ignore[attr-defined]

    def autocast(self) -> AbstractContextManager[None]:
        """For a forward pass; its outputs stay in the type they are computed in."""
        if self._dtype is None:
            return contextlib.nullcontext()
        # With the cache, a half-precision copy of every weight lives until the forward pass ends, though checkpointing
        # needs one layer's at a time. Each weight is used once in a pass: nothing to cache.
        return torch.autocast(self._device.type, self._dtype, cache_enabled=False)  # type: ignore[return-value]

    def backward(self, loss: Tensor) -> None:
        """``loss.backward()``, times the loss scale."""
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide its gradients by the loss scale; once a step."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def unscale(self, values: Tensor) -> None:
        """Divide what came from gradients by the loss scale, in place; see ``loss_scaling.py``."""
        if self.scaler is not None:
            unscale(self.scaler, values)

    def update_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with finite gradients, and let the loss scale move on."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.update_scale()

    def update_scale(self) -> None:
        """By what was found while unscaling."""
        if self.scaler is not None:
            self.scaler.update()
