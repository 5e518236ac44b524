"""Masters of bfloat16 weights, stored next to them so that updates smaller than the weights' rounding are not lost.

The weight is the upper half of a float32 number, rounded to nearest, and a format keeps the lower half in full, in
part, or not at all. "Nearest" rounds ties away from zero in every format alike, so that the exact ones (``fp32``,
``split16``) train the same model bit for bit. If other code writes to a weight, even through ``weight.data``, whose
changes torch does not count, the next update starts from that value: exactly with a copy, and with the old lower bits
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from lowmem_ft.optimizers.counter_random import CounterRandom
from lowmem_ft.optimizers.formats.operators import (
    read_copy,
    read_split,
    write_nearest,
    write_split16,
    write_split24,
    write_stochastic,
)

_STREAM = 0


class MasterFormat:
    """The way in which a weight's float32 value is kept: by default in the weight alone, rounded to nearest."""

    tensors: Mapping[str, torch.dtype] = MappingProxyType({})
    """Types by name of the tensors kept next to the weight, which have as many elements."""

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the float32 value, to be updated in place: a new tensor, or the weight itself if that is float32."""
        return weight.float()

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Store a float32 value: rounded in the weight, and the rest in the master's tensors."""
        write_nearest(value, weight)


class Float32Weight(MasterFormat):
    """A float32 weight, which is its own master."""

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the weight."""
        return weight

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Store nothing more: the update was made in place."""
        if value is not weight:
            weight.copy_(value)


class Float32Copy(MasterFormat):
    """A float32 copy next to the weight: 4 bytes per parameter, exact."""

    tensors = MappingProxyType({"master": torch.float32})

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return the copy, or the weight where it has been written to since."""
        return read_copy(weight, kept["master"])

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Set the weight to the copy, rounded."""
        kept["master"].copy_(value)
        write_nearest(value, weight)


class Split16(MasterFormat):
    """The lower 16 bits of float32 next to the weight: 2 bytes per parameter, exact.

    Equals: float32 weights, bit for bit, for every number. A NaN stays one, but may change its other bits.

    Source: the lower half as it is; Ortiz et al., "FlashOptim", 2026, keep a scaled error of 8 or 16 bits instead.
    """

    tensors = MappingProxyType({"low": torch.int16})

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Return what is kept, joined; with a byte in place of the lower half, the last 8 bits are zero."""
        return read_split(weight, kept["low"])

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Write both halves."""
        write_split16(value, weight, kept["low"])


class Split24(Split16):
    """Bits 8 to 15 of float32 next to the weight: 1 byte per parameter, the last 8 bits rounded at random.

    Equals: float32 weights in the mean: each update is kept in full on average, however small. Rounded to nearest, an
    update below 1/256 of a bfloat16 unit would be lost every time.
    """

    tensors = MappingProxyType({"low": torch.int8})

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Write 24 bits."""
        write_split24(value, weight, kept["low"], random.key(_STREAM), random.element)


class StochasticRounding(MasterFormat):
    """No master: the weight is rounded up or down at random.

    Equals: float32 weights in the mean.
    Costs: noise of about half a bfloat16 unit per step, far more than a small update.

    Source: Zamirai et al., "Revisiting BFloat16 Training", 2020.
    """

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Round up with the probability that the lower 16 bits give."""
        write_stochastic(value, weight, random.key(_STREAM), random.element)


class NoMaster(MasterFormat):
    """No master: the weight is rounded to nearest, and updates below 1/512 of it are lost."""


MASTER_FORMATS: dict[str, MasterFormat] = {
    "fp32": Float32Copy(),
    "split16": Split16(),
    "split24": Split24(),
    "stochastic_rounding": StochasticRounding(),
    "none": NoMaster(),
}
"""Master formats by their names in ``optimizer.master``; float32 weights use :class:`Float32Weight` instead."""

_FLOAT32_WEIGHT = Float32Weight()


def master_format(name: str, weights_dtype: torch.dtype) -> MasterFormat:
    """Return the format of a weight; ``name`` is ``optimizer.master``, which applies to bfloat16 weights."""
    return _FLOAT32_WEIGHT if weights_dtype == torch.float32 else MASTER_FORMATS[name]
