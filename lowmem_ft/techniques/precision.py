"""Which types a run may use on its device, and a meter for the updates that 16-bit weights lose."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lowmem_ft.devices import has_bfloat16, name_of
from lowmem_ft.errors import UserError
from lowmem_ft.handle import Handle

logger = logging.getLogger(__name__)

SAMPLED_ELEMENTS = 4096
"""Elements looked at in each parameter, each standing for its neighbours that are not."""

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_precision(dtype: str, mixed_precision: str, device: torch.device) -> None:
    """Refuse weights and autocast that this device cannot compute with, or that would train wrongly in silence.

    Args:
        dtype: ``model.dtype`` with ``auto`` resolved: ``float32``, ``bfloat16`` or ``float16``.
        mixed_precision: ``training.mixed_precision``: ``no``, ``bf16`` or ``fp16``.
        device: where the model trains.

    Raises:
        UserError: naming every rule that is broken.
    """
    problems = [
        *_float16_problems(dtype, mixed_precision, device),
        *_bfloat16_problems(dtype, mixed_precision, device),
    ]
    if problems:
        raise UserError(*problems)
    if dtype == "bfloat16" and mixed_precision == "bf16":
        logger.info(
            "training.mixed_precision=bf16 changes little with model.dtype=bfloat16: weights and matrix products are "
            "bfloat16 already; autocast only keeps some sums in float32"
        )


class LostUpdateMeter(Handle):
    """What share of an optimizer's updates is too small to change the stored weights.

    A weight of bfloat16 has 8 bits: an update below 1/512 to 1/256 of it rounds away, every step anew. An element
    counts when its gradient is not zero, and as lost when the step leaves its bits as they were.

    Costs: at most 4096 elements a parameter, strided over it, copied before the step and compared after it; some
    10 small kernels a parameter and 20 KB of device memory each. The counts stay on the device: the step never
    waits for it, reading a fraction does.
    Limits: a step is not measured in groups whose learning rate is 0, as at the start of a warm-up. Of a sharded
    parameter this process sees its own shard.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(
            optimizer.register_step_pre_hook(self._before_step).remove,
            optimizer.register_step_post_hook(self._after_step).remove,
        )
        self._samples: list[_Sample] = []
        self._last: dict[torch.device, Tensor] = {}
        self._total: dict[torch.device, Tensor] = {}
        self._last_rate = self._peak_rate = 0.0
        self._warned = False

    @property
    def fraction(self) -> float:
        """Share of the last step's updates that were lost, 0 to 1; 0 before the first step.

        Waits for the device. The first time it finds more than half lost, with the learning rate at half its peak
        or more (so not during warm-up), it logs a warning with the ways out.
        """
        fraction = _ratio(self._last)
        if fraction > 0.5 and not self._warned and self._last_rate >= 0.5 * self._peak_rate:
            self._warned = True
            logger.warning(
                "%.1f %% of the updates of the last step changed no weight: at learning rate %.2g they are smaller "
                "than the rounding of the weights' type, and the model hardly learns. Set model.dtype=float32 and "
                "training.mixed_precision=bf16, or raise training.learning_rate.",
                100 * fraction,
                self._last_rate,
            )
        return fraction

    @property
    def total_fraction(self) -> float:
        """Share of all updates since the meter was enabled that were lost, 0 to 1; waits for the device."""
        return _ratio(self._total)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        groups = [group for group in optimizer.param_groups if group["lr"] != 0]
        self._samples = [
            _Sample.take(parameter)
            for group in groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._last_rate = max((group["lr"] for group in groups), default=0.0)
        self._peak_rate = max((group.get("initial_lr", group["lr"]) for group in groups), default=0.0)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._last = {}
        for sample in self._samples:
            _add(self._last, sample.count())
        for counts in self._last.values():
            _add(self._total, counts)
        self._samples = []


def enable_lost_update_meter(optimizer: Optimizer) -> LostUpdateMeter:
    """A meter on every step of an optimizer, for weights kept in 16 bits without a 32-bit master copy.

    Args:
        optimizer: any that follows ``torch.optim.Optimizer``, bitsandbytes' included; the optimizer itself, not
            Accelerate's wrapper around it.

    Returns:
        The meter; ``remove()`` takes it off, and its fractions stay readable.
    """
    return LostUpdateMeter(optimizer)


def _float16_problems(dtype: str, mixed_precision: str, device: torch.device) -> list[str]:
    problems = []
    if dtype == "float16":
        problems.append(
            "Weights to be trained are float32 or bfloat16, got model.dtype=float16: its range is too small for "
            "updates. Set model.dtype=float32, with training.mixed_precision=fp16 for speed."
        )
    if mixed_precision == "fp16" and dtype != "float32":
        problems.append(
            "training.mixed_precision=fp16 needs float32 weights, for the loss scaler has to unscale their gradients "
            f"in float32; got model.dtype={dtype}. Set model.dtype=float32."
        )
    if mixed_precision == "fp16" and device.type == "cpu":
        problems.append(
            "training.mixed_precision=fp16 needs a GPU, got device cpu, where Accelerate would train without it and "
            "not say so. Set training.mixed_precision=bf16 or no."
        )
    return problems


def _bfloat16_problems(dtype: str, mixed_precision: str, device: torch.device) -> list[str]:
    settings = {
        "model.dtype=bfloat16": dtype == "bfloat16",
        "training.mixed_precision=bf16": mixed_precision == "bf16",
    }
    asked = " and ".join(setting for setting, is_set in settings.items() if is_set)
    if not asked or has_bfloat16(device):
        return []
    return [
        "bfloat16 needs a GPU that computes with it (NVIDIA: Ampere, 2020, or newer), got "
        f"{asked} on {name_of(device)}. Set model.dtype=float32 and training.mixed_precision=fp16, or no to train "
        "in float32."
    ]


@dataclass(frozen=True)
class _Sample:
    """Every ``stride``-th element of a parameter as it was before a step."""

    parameter: Tensor
    bits: Tensor
    has_gradient: Tensor
    stride: int

    @classmethod
    def take(cls, parameter: Tensor) -> _Sample:
        assert parameter.grad is not None
        stride = _stride(parameter)
        has_gradient = _flat(parameter.grad)[::stride] != 0
        return cls(parameter, _bits(parameter, stride).clone(), has_gradient, stride)

    def count(self) -> Tensor:
        """Lost updates and all updates of the parameter, on its device and without waiting for it."""
        lost = (_bits(self.parameter, self.stride) == self.bits) & self.has_gradient
        return torch.stack((lost.sum(), self.has_gradient.sum())) * self.stride


def _flat(tensor: Tensor) -> Tensor:
    """This process's elements in one row; a view where the memory is contiguous."""
    local = tensor.detach()
    if hasattr(local, "to_local"):  # a DTensor of FSDP2
        local = local.to_local()  # type: ignore[attr-defined]
    return local.flatten()


def _stride(tensor: Tensor) -> int:
    """Sample every how many elements: prime to the row length, or a sample could be a few whole columns."""
    stride = max(1, math.ceil(_flat(tensor).numel() / SAMPLED_ELEMENTS))
    while math.gcd(stride, tensor.shape[-1] if tensor.ndim else 1) > 1:
        stride += 1
    return stride


def _bits(tensor: Tensor, stride: int) -> Tensor:
    """The sample as integers: equal only if the bits are, NaN and -0 included."""
    return _flat(tensor)[::stride].view(_INTEGER_OF_SIZE[tensor.dtype.itemsize])


def _add(sums: dict[torch.device, Tensor], counts: Tensor) -> None:
    """Add counts to the running sum of their device; a model may lie on several."""
    sums[counts.device] = sums[counts.device] + counts if counts.device in sums else counts


def _ratio(sums: dict[torch.device, Tensor]) -> float:
    counts = [counts.tolist() for counts in sums.values()]
    updates = sum(total for _, total in counts)
    return sum(lost for lost, _ in counts) / updates if updates else 0.0
