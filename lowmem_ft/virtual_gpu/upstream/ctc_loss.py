"""``torch.ctc_loss`` as CUDA computes it, by cuDNN or by a kernel of torch's own.

Source: pytorch, aten/src/ATen/native/LossCTC.cpp and cudnn/LossCTC.cpp.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lowmem_ft.foundation.upstream.patches import wrap
from lowmem_ft.foundation.virtual_device import DEVICE_TYPE
from lowmem_ft.virtual_gpu.values.constant_propagation import known_values

_LONGEST_OF_CUDNN = 255


def ctc_loss_without_values(undo: contextlib.ExitStack) -> None:
    """Compute the loss on fake tensors until a stack is undone."""
    wrap(undo, torch, "ctc_loss", _ctc_loss)


def _ctc_loss(
    loss: Callable[..., Tensor],
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Compute ``torch.ctc_loss`` with lengths as the numbers that torch's C++ reads."""
    if not isinstance(log_probs, FakeTensor):
        return loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    is_batched = log_probs.dim() == 3
    batch = log_probs.shape[1] if is_batched else 1
    most = targets.shape[-1] if targets.dim() == 2 or batch == 1 else targets.shape[0] // batch
    inputs, wanted = (
        _numbers(lengths, [instead] * batch)
        for lengths, instead in ((input_lengths, log_probs.shape[0]), (target_lengths, most))
    )
    if _is_by_cudnn(log_probs, targets, (input_lengths, target_lengths), blank) and all(
        map(_fits_cudnn, inputs, wanted)
    ):
        targets = targets.to(log_probs.device)
        losses, _ = torch._cudnn_ctc_loss(log_probs, targets, inputs, wanted, blank, True, zero_infinity)
    else:
        losses, _ = torch._ctc_loss(
            log_probs if is_batched else log_probs.unsqueeze(1),
            targets.to(log_probs.device, torch.int64) if is_batched else targets.unsqueeze(0),
            inputs,
            wanted,
            blank,
            zero_infinity,
        )
        if zero_infinity:
            losses = torch.where(losses == float("inf"), torch.zeros_like(losses), losses)
    if reduction == 1:
        return (losses / torch.tensor(wanted, device=losses.device).clamp_min(1)).mean()
    return losses.sum() if reduction == 2 else losses if is_batched else losses.squeeze(0)


def _fits_cudnn(input_length: int, target_length: int) -> bool:
    return target_length <= min(input_length, _LONGEST_OF_CUDNN)


def _is_by_cudnn(log_probs: Tensor, targets: Tensor, lengths: tuple[Any, Any], blank: int) -> bool:
    """Return whether cuDNN's kernel takes types and shapes: targets one after the other, and all in 32 bits."""
    if log_probs.device.type != DEVICE_TYPE or not torch.backends.cudnn.enabled or blank != 0:
        return False
    if all(isinstance(each, Tensor) for each in lengths):
        takes_lengths = all(each.dtype == torch.int32 for each in lengths)
    else:
        takes_lengths = targets.device.type == "cpu" and set(lengths[0]) == {log_probs.shape[0]}
    return (
        (log_probs.dim(), log_probs.dtype) == (3, torch.float32)
        and (targets.dim(), targets.dtype) == (1, torch.int32)
        and takes_lengths
    )


def _numbers(lengths: Any, instead: list[int]) -> list[int]:
    """Return lengths, or others in place of those that a trace does not know."""
    if isinstance(lengths, Tensor):
        known = known_values(lengths)
        return instead if known is None else known.flatten().tolist()
    return list(lengths)
