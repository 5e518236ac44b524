"""Formats of running averages: float32, bfloat16, or 8 bits with a scale for each block of 256."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lowmem_ft.optimizers.counter_random import CounterRandom
from lowmem_ft.optimizers.formats.operators import (
    BLOCK,
    SIGNED_OCTAVES,
    UNSIGNED_OCTAVES,
    read_blocks,
    write_blocks,
    write_stochastic,
)


@dataclass(frozen=True)
class StateFormat(ABC):
    """The way in which one running average is kept in tensors next to the weight: by default in one.

    Args:
        signed: whether values may be negative.
    """

    signed: bool
    dtype: ClassVar[torch.dtype]
    """Type of the tensor, if there is one."""

    def tensors(self, name: str, num_elements: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return length and type of each tensor that keeps the average ``name``."""
        return {name: (num_elements, self.dtype)}

    def chunk(self, kept: Mapping[str, Tensor], name: str, start: int, stop: int) -> dict[str, Tensor]:
        """Return views of a chunk's tensors: the elements from ``start`` to before ``stop``."""
        return {name: kept[name][start:stop]}

    @abstractmethod
    def read(self, kept: Mapping[str, Tensor], name: str, num_elements: int) -> Tensor:
        """Return the average in float32, to be updated in place; the stored tensor itself if that is float32."""

    @abstractmethod
    def write(
        self, value: Tensor, kept: Mapping[str, Tensor], name: str, random: CounterRandom, stream: int
    ) -> None:
        """Store a float32 average."""


class Float32State(StateFormat):
    """Float32, as computed: 4 bytes per parameter."""

    dtype = torch.float32

    def read(self, kept: Mapping[str, Tensor], name: str, num_elements: int) -> Tensor:
        """Return the tensor itself."""
        return kept[name]

    def write(
        self, value: Tensor, kept: Mapping[str, Tensor], name: str, random: CounterRandom, stream: int
    ) -> None:
        """Store nothing more: the update was made in place."""
        if value is not kept[name]:
            kept[name].copy_(value)


class BFloat16State(StateFormat):
    """Bfloat16: 2 bytes per parameter, rounded at random to one of the two nearest values.

    Rounded to nearest, an average over 1000 steps would not move: each step moves it by a thousandth, and bfloat16 has
    steps of 1/256.
    """

    dtype = torch.bfloat16

    def read(self, kept: Mapping[str, Tensor], name: str, num_elements: int) -> Tensor:
        """Return a float32 copy."""
        return kept[name].float()

    def write(
        self, value: Tensor, kept: Mapping[str, Tensor], name: str, random: CounterRandom, stream: int
    ) -> None:
        """Round without bias."""
        write_stochastic(value, kept[name], random.key(stream), random.element)


class BlockwiseState(StateFormat):
    """8-bit floating-point codes with 3 mantissa bits, and a float32 scale for each block of 256.

    A code counts eighths of octaves: its bits are the upper bits of ``value / scale + floor`` in float32, so that codes
    are spaced evenly below the floor and by a sixteenth to an eighth of the value above it. They are rounded at random
    to one of the two nearest codes, without bias; rounded to nearest, an average over 1000 steps would not move.

    Limits: ``|kept - value| <= (value + floor * scale) / 8``, where the scale is the block's largest value. The floor
    is 2**-15 for averages with a sign (7 bits for the magnitude) and 2**-31 for those without: a second moment is kept
    to an eighth over nine orders of magnitude. It never becomes zero, by which a step would divide: the smallest code
    means an eighth of the floor.

    Source: blocks: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022.
    """

    @property
    def floor(self) -> float:
        """Share of the block's largest value below which codes are spaced evenly."""
        return 2.0 ** -(SIGNED_OCTAVES if self.signed else UNSIGNED_OCTAVES)

    def tensors(self, name: str, num_elements: int) -> dict[str, tuple[int, torch.dtype]]:
        """Return codes and scales."""
        return {
            name: (num_elements, torch.int8 if self.signed else torch.uint8),
            f"{name}_scale": (-(-num_elements // BLOCK), torch.float32),
        }

    def chunk(self, kept: Mapping[str, Tensor], name: str, start: int, stop: int) -> dict[str, Tensor]:
        """Return the codes, and the scales of their blocks; ``start`` begins a block."""
        scale = f"{name}_scale"
        return {name: kept[name][start:stop], scale: kept[scale][start // BLOCK : -(-stop // BLOCK)]}

    def read(self, kept: Mapping[str, Tensor], name: str, num_elements: int) -> Tensor:
        """Return a float32 copy."""
        return read_blocks(kept[name], kept[f"{name}_scale"], self.signed)

    def write(
        self, value: Tensor, kept: Mapping[str, Tensor], name: str, random: CounterRandom, stream: int
    ) -> None:
        """Round without bias, each block by its own largest value."""
        scale = kept[f"{name}_scale"]
        write_blocks(value, kept[name], scale, self.signed, random.key(stream), random.element)


_BY_NAME = {"fp32": Float32State, "bf16": BFloat16State, "8bit": BlockwiseState}


def state_format(name: str, *, signed: bool) -> StateFormat:
    """Return the format that ``optimizer.state`` names, for an average that may be negative or not."""
    return _BY_NAME[name](signed)
