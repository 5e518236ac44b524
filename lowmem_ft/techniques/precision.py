"""A meter for the updates that 16-bit weights lose."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lowmem_ft.foundation.devices import has_values
from lowmem_ft.foundation.tensors.local_shards import local_part
from lowmem_ft.techniques.technique import Technique

__all__ = ["enable_lost_update_meter"]

logger = logging.getLogger(__name__)

SAMPLED_ELEMENTS = 4096
"""Elements sampled in each parameter; each represents its neighbours that are not."""

_INTEGER_OF_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}

UpdateHook = Callable[[nn.Parameter, int, Tensor, Tensor, Mapping[str, Any]], "Callable[[], None] | None"]
"""Hook called before an update; it returns a function to call after it, or None.

It takes a parameter, the first element of the part to be updated, that part of weight and gradient (flat), and the
hyperparameters.
"""


@runtime_checkable
class _SupportsUpdateHooks(Protocol):
    """An optimizer that announces which part of which parameter it updates, in a step or in backward."""

    def register_update_hook(self, hook: UpdateHook) -> RemovableHandle:
        """Register a hook to be called before each update."""
        ...


class LostUpdateMeter(Technique):
    """Meter for the share of an optimizer's updates that are too small to change the stored weights.

    A weight of bfloat16 has 8 bits: an update below 1/512 to 1/256 of it rounds away, in every step again. An element
    counts when its gradient is not zero, and as lost when the step leaves its bits as they were.

    Costs: at most 4096 elements of each part that is updated at once, strided over it, copied before and compared
    after; some 10 small kernels and 20 KB of device memory each. The counts stay on the device: the step never waits
    for it, only reading a fraction does.
    Limits: an update is not measured while its learning rate is 0, as at the start of a warm-up. For a sharded
    parameter, this process counts its own shard.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, _SupportsUpdateHooks):
            super().__init__(self._log_total, optimizer.register_update_hook(self._before_update).remove)
        else:
            super().__init__(
                self._log_total,
                optimizer.register_step_pre_hook(self._before_step).remove,
                optimizer.register_step_post_hook(self._after_step).remove,
            )
        self._after: list[Callable[[], None]] = []
        self._seen: set[tuple[int, int]] = set()
        self._last: dict[torch.device, Tensor] = {}
        self._total: dict[torch.device, Tensor] = {}
        self._last_rate = self._peak_rate = 0.0
        self._dtypes: set[torch.dtype] = set()
        self._warned = False

    @property
    def fraction(self) -> float:
        """Share of the last step's updates that were lost, 0 to 1; 0 before the first step.

        Waits for the device. The first time it finds more than half lost, with the learning rate at half its peak
        or more (so not during warm-up), it logs a warning with the ways out.
        """
        fraction, is_known = _ratio(self._last), _is_known(self._last)
        if is_known and fraction > 0.5 and not self._warned and self._last_rate >= 0.5 * self._peak_rate:
            self._warned = True
            logger.warning(
                "%.1f%% of the updates of the last step did not change a weight: at learning rate %.2g they are "
                "smaller than the rounding of the weights' type, and the model hardly learns. Set "
                "optimizer.master=split24 or =split16, or raise training.learning_rate.",
                100 * fraction,
                self._last_rate,
            )
        return fraction

    @property
    def total_fraction(self) -> float:
        """Share of all updates since the meter was enabled that were lost, 0 to 1; waits for the device."""
        return _ratio(self._total)

    def metrics(self) -> dict[str, float]:
        """Return ``lost_updates``: see :attr:`fraction`."""
        return {"lost_updates": self.fraction}

    def _log_total(self) -> None:
        """Log the meter's total as it is removed."""
        if not self._total or not _is_known(self._total):
            return
        logger.warning(
            "%.1f%% of the sampled weight updates were lost to rounding in %s (model.dtype); float32 weights lose "
            "no update.",
            100 * self.total_fraction,
            " and ".join(sorted(str(dtype) for dtype in self._dtypes if dtype.itemsize < 4)),
        )

    def _before_update(
        self,
        parameter: nn.Parameter,
        start: int,
        weight: Tensor,
        gradient: Tensor,
        hyperparameters: Mapping[str, Any],
    ) -> Callable[[], None] | None:
        if (id(parameter), start) in self._seen:  # seen before: another step has begun
            self._seen.clear()
            self._last_rate = 0.0
            for sums in self._last.values():
                sums.zero_()
        self._seen.add((id(parameter), start))
        rate = hyperparameters["lr"]
        if rate == 0:
            return None
        self._last_rate = max(self._last_rate, rate)
        self._peak_rate = max(self._peak_rate, hyperparameters.get("initial_lr", rate))
        self._dtypes.add(weight.dtype)
        sample = _Sample.take(weight, gradient, row_length=parameter.shape[-1] if parameter.ndim else 1)

        def count() -> None:
            _add(self._last, counts := sample.count())
            _add(self._total, counts)

        return count

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Sample all parameters with gradients, for an optimizer that does not announce its updates."""
        updates = [
            self._before_update(parameter, 0, _flat(parameter), _flat(parameter.grad), group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        self._after = [after for after in updates if after is not None]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for after in self._after:
            after()
        self._after = []


def enable_lost_update_meter(optimizer: Optimizer) -> LostUpdateMeter:
    """Put a meter on every step of an optimizer, for weights kept in 16 bits without a 32-bit master copy.

    Args:
        optimizer: any that follows ``torch.optim.Optimizer``, bitsandbytes' included; the optimizer itself, not
            Accelerate's wrapper around it.

    Returns:
        The meter; ``remove()`` removes it, and its fractions stay readable.
    """
    return LostUpdateMeter(optimizer)


@dataclass(frozen=True)
class _Sample:
    """Every ``stride``-th element of a part of a weight as it was before an update."""

    weight: Tensor
    bits: Tensor
    has_gradient: Tensor
    stride: int

    @classmethod
    def take(cls, weight: Tensor, gradient: Tensor, *, row_length: int) -> _Sample:
        stride = _stride(weight.numel(), row_length)
        has_gradient = (gradient[::stride] != 0).to(weight.device)
        return cls(weight, _bits(weight, stride).clone(), has_gradient, stride)

    def count(self) -> Tensor:
        """Return lost updates and all updates of the part, on its device and without waiting for it."""
        lost = (_bits(self.weight, self.stride) == self.bits) & self.has_gradient
        return torch.stack((lost.sum(), self.has_gradient.sum())) * self.stride


def _flat(tensor: Tensor) -> Tensor:
    """Return this process's elements as one flat tensor; a view if the memory is contiguous."""
    return local_part(tensor.detach()).flatten()


def _stride(num_elements: int, row_length: int) -> int:
    """Return the sampling stride: coprime to the row length, or a sample could consist of a few whole columns."""
    stride = max(1, math.ceil(num_elements / SAMPLED_ELEMENTS))
    while math.gcd(stride, row_length) > 1:
        stride += 1
    return stride


def _bits(flat: Tensor, stride: int) -> Tensor:
    """Return the sample as integers: equal only if the bits are, NaN and -0 included."""
    return flat[::stride].view(_INTEGER_OF_SIZE[flat.dtype.itemsize])


def _add(sums: dict[torch.device, Tensor], counts: Tensor) -> None:
    """Add counts to the running sum of their device; a model may be spread over several.

    The sum stays where it is: updates may be made in several streams, by turns.
    """
    if counts.device not in sums:
        sums[counts.device] = torch.zeros_like(counts)
    sums[counts.device] += counts


def _is_known(counts: dict[torch.device, Tensor]) -> bool:
    """Return whether there is anything to warn about: without values nothing has been counted."""
    return all(map(has_values, counts.values()))


def _ratio(sums: dict[torch.device, Tensor]) -> float:
    counts = [counts.tolist() for counts in sums.values()]
    updates = sum(total for _, total in counts)
    return sum(lost for lost, _ in counts) / updates if updates else 0.0
