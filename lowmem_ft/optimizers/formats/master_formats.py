"""What a bfloat16 weight keeps beside it, so that updates smaller than its rounding are not lost.

The weight is the upper half of a float32 number, rounded to nearest, and a format keeps the lower half in full, in
part, or not at all. "Nearest" rounds ties away from zero in every format alike, so that the exact ones (``fp32``,
``split16``) train the same model bit for bit. What somebody else writes into a weight, even through ``weight.data``, of
which torch keeps no count, is where the next update starts: exactly with a copy, and with the old lower bits otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

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
_NOTHING = MappingProxyType[str, torch.dtype]({})


class MasterFormat(Protocol):
    """How the float32 value of a weight is kept."""

    @property
    def tensors(self) -> Mapping[str, torch.dtype]:
        """What is kept beside the weight, one element each."""
        ...

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The float32 value, to be updated in place: a new tensor, or the weight itself if that is float32."""
        ...

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Keep a float32 value: in the weight, rounded, and in what is beside it."""
        ...


class Float32Weight:
    """A float32 weight is its own master."""

    tensors = _NOTHING

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The weight."""
        return weight

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Nothing is left to do after an update in place."""
        if value is not weight:
            weight.copy_(value)


class Float32Copy:
    """A float32 copy beside the weight: 4 bytes a parameter, exact."""

    tensors = MappingProxyType({"master": torch.float32})

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The copy, or what has been written into the weight since."""
        return read_copy(weight, kept["master"])

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """The weight is the copy, rounded."""
        kept["master"].copy_(value)
        write_nearest(value, weight)


class Split16:
    """The lower 16 bits of float32 beside the weight: 2 bytes a parameter, exact.

    Equals: float32 weights, bit for bit, for every number. A NaN stays one, but may change its other bits.

    Source: the lower half as it is, where Ortiz et al., "FlashOptim", 2026, keep a scaled error of 8 or 16 bits.
    """

    tensors = MappingProxyType({"low": torch.int16})

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """Both halves."""
        return read_split(weight, kept["low"])

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Both halves."""
        write_split16(value, weight, kept["low"])


class Split24:
    """Bits 8 to 15 of float32 beside the weight: 1 byte a parameter, the last 8 bits rounded at random.

    Equals: float32 weights in the mean: each update is kept in full on average, however small. To nearest, an update
    below 1/256 of a bfloat16 unit would be lost every time.
    """

    tensors = MappingProxyType({"low": torch.int8})

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The upper half and the byte below it; the last 8 bits are zero."""
        return read_split(weight, kept["low"])

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """24 bits."""
        write_split24(value, weight, kept["low"], random.key(_STREAM), random.element)


class StochasticRounding:
    """Nothing beside the weight, which is rounded up or down at random.

    Equals: float32 weights in the mean.
    Costs: noise of about half a bfloat16 unit a step, far more than a small update.

    Source: Zamirai et al., "Revisiting BFloat16 Training", 2020.
    """

    tensors = _NOTHING

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The weight in float32."""
        return weight.float()

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """Up as often as the lower 16 bits say."""
        write_stochastic(value, weight, random.key(_STREAM), random.element)


class NoMaster:
    """Nothing beside the weight, which is rounded to nearest: updates below 1/512 of it are lost."""

    tensors = _NOTHING

    def read(self, weight: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        """The weight in float32."""
        return weight.float()

    def write(self, value: Tensor, weight: Tensor, kept: Mapping[str, Tensor], random: CounterRandom) -> None:
        """To nearest."""
        write_nearest(value, weight)


MASTER_FORMATS: dict[str, MasterFormat] = {
    "fp32": Float32Copy(),
    "split16": Split16(),
    "split24": Split24(),
    "stochastic_rounding": StochasticRounding(),
    "none": NoMaster(),
}
"""By the name in ``optimizer.master``; float32 weights have none of them, see :class:`Float32Weight`."""

_FLOAT32_WEIGHT = Float32Weight()


def master_format(name: str, weights_dtype: torch.dtype) -> MasterFormat:
    """The format of a weight, given what ``optimizer.master`` says about bfloat16 ones."""
    return _FLOAT32_WEIGHT if weights_dtype == torch.float32 else MASTER_FORMATS[name]
