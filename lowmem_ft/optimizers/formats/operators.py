"""The formats' arithmetic as operators of torch: ``lowmem_ft::read_split``, ``write_blocks`` and so on.

Each is a dozen elementwise kernels over a chunk. As one operator it is one entry in a profile and in a trace, which
gets the bytes that all of them take and move and their number of launches, and it can be replaced by a single kernel.

All of it works on the bits of float32 as int32. The upper half of a float32 is a bfloat16; "nearest" rounds it with
ties away from zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowmem_ft.foundation.tensors.own_operators import register_operator
from lowmem_ft.optimizers.counter_random import random_bits

BLOCK = 256
"""Elements that share a scale in 8-bit state."""

SIGNED_OCTAVES, UNSIGNED_OCTAVES = 15, 31
"""Powers of two that 7 and 8 bits of code reach below a block's largest value, with 8 codes each."""

_CODE_SHIFT = 20
"""Bits by which a code is shifted: float32 has 23 mantissa bits, a code 3."""

_SMALLEST_SCALE = 2.0**-126
"""The smallest normal number; the codes of a block of zeros are the smallest code whatever its scale."""

_HALF = 0x8000  # half a unit of the upper half's last bit
_LAST_NAN = 0x7FFF0000
_SIGN = -(2**31)

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {}
"""The functions behind the operators, by name."""


def _operator(
    schema: str,
    fake: Callable[..., Any],
    launches: Callable[..., int],
    moved_bytes: Callable[..., int],
    temporary_bytes: Callable[..., int] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator for a format's arithmetic; a test counts bytes and launches on the function itself.

    It calls ``register_operator``. The costs for averages are those of a signed one, which takes more.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        IMPLEMENTATIONS[function.__name__] = function
        return register_operator(
            function,
            schema,
            fake,
            moved_bytes=moved_bytes,
            temporary_bytes=temporary_bytes,
            launches=launches,
            irrelevant=("key", "element"),
        )

    return register


def _by_element(num_bytes: int) -> Callable[..., int]:
    """Return a cost of ``num_bytes`` for each element of the operator's first argument."""
    return lambda chunk, *others: num_bytes * chunk.numel()


def _is_ragged(chunk: Tensor) -> bool:
    """Return whether the chunk's last block is incomplete."""
    return chunk.numel() % BLOCK != 0


@_operator(
    "(Tensor weight, Tensor master) -> Tensor",
    lambda weight, master: torch.empty_like(master),
    launches=lambda *chunk: 5,
    moved_bytes=_by_element(48),
    temporary_bytes=_by_element(9),
)
def read_copy(weight: Tensor, master: Tensor) -> Tensor:
    """Return the float32 that a bfloat16 weight is rounded from, ties either way; if written to since, the weight."""
    value = weight.float()
    rest = master.view(torch.int32) - value.view(torch.int32)
    return torch.where(rest.clamp(-_HALF, _HALF) == rest, master, value)


@_operator(
    "(Tensor weight, Tensor low) -> Tensor",
    lambda weight, low: weight.new_empty(weight.shape, dtype=torch.float32),
    launches=lambda *chunk: 5,
    moved_bytes=_by_element(38),
    temporary_bytes=_by_element(2),
)
def read_split(weight: Tensor, low: Tensor) -> Tensor:
    """Join a bfloat16 upper half and the bits below it to float32: 16 (int16), or 8 with 8 zeros after them (int8).

    The lower bits count as negative where the upper half was rounded up. A weight that has been set to 0 since has no
    lower bits: there they would make a NaN.
    """
    size = weight.abs().float()
    size.view(torch.int32).add_(low, alpha=2 ** (16 - 8 * low.dtype.itemsize)).clamp_(min=0)
    return size.copysign_(weight)


@_operator(
    "(Tensor value, Tensor(a!) weight, Tensor(b!) low) -> ()",
    lambda value, weight, low: None,
    launches=lambda *chunk: 8,
    moved_bytes=_by_element(64),
    temporary_bytes=_by_element(4),
)
def write_split16(value: Tensor, weight: Tensor, low: Tensor) -> None:
    """Split float32 into its upper half, rounded to nearest, and its lower 16 bits as they are."""
    bits = value.view(torch.int32)
    low.copy_(bits)  # conversion to int16 is modulo 2**16
    _keep_upper_half(bits, _HALF, weight)


@_operator(
    "(Tensor value, Tensor(a!) weight, Tensor(b!) low, int key, int element) -> ()",
    lambda value, weight, low, key, element: None,
    launches=lambda *chunk: 26,
    moved_bytes=_by_element(129),
    temporary_bytes=_by_element(8),
)
def write_split24(value: Tensor, weight: Tensor, low: Tensor, key: int, element: int) -> None:
    """Split float32 into upper half, to nearest, and the byte below, rounded up as often as the last 8 bits say."""
    bits = value.view(torch.int32)
    noise = random_bits(8, key, element, value.numel(), value.device)
    low.copy_((bits + noise).bitwise_right_shift_(8))  # conversion to int8 is modulo 256
    _keep_upper_half(bits, noise.add_(_HALF), weight)


@_operator(
    "(Tensor value, Tensor(a!) target) -> ()",
    lambda value, target: None,
    launches=lambda *chunk: 7,
    moved_bytes=_by_element(56),
    temporary_bytes=_by_element(4),
)
def write_nearest(value: Tensor, target: Tensor) -> None:
    """Round float32 to the nearest bfloat16."""
    _keep_upper_half(value.view(torch.int32), _HALF, target)


@_operator(
    "(Tensor value, Tensor(a!) target, int key, int element) -> ()",
    lambda value, target, key, element: None,
    launches=lambda *chunk: 23,
    moved_bytes=_by_element(134),
    temporary_bytes=_by_element(8),
)
def write_stochastic(value: Tensor, target: Tensor, key: int, element: int) -> None:
    """Round float32 to one of the two nearest bfloat16, up as often as its lower 16 bits say."""
    noise = random_bits(16, key, element, value.numel(), value.device)
    _keep_upper_half(value.view(torch.int32), noise, target)


@_operator(
    "(Tensor codes, Tensor scale, bool signed) -> Tensor",
    lambda codes, scale, signed: codes.new_empty(codes.shape, dtype=torch.float32),
    launches=lambda codes, scale, signed: 5 + 3 * signed + _is_ragged(codes),
    moved_bytes=_by_element(56),
    temporary_bytes=lambda codes, scale, signed: codes.numel() if signed else 0,
)
def read_blocks(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """Decode float32 from 8-bit codes; see :class:`lowmem_ft.optimizers.formats.state_formats.BlockwiseState`."""
    octaves = SIGNED_OCTAVES if signed else UNSIGNED_OCTAVES
    bits = codes.to(torch.int32)
    if signed:
        bits.abs_()
    value = bits.bitwise_left_shift_(_CODE_SHIFT).add_(_floor_bits(octaves)).view(torch.float32)
    value.sub_(2.0**-octaves)
    if signed:
        value.mul_(codes.sign())
    whole = value.numel() - value.numel() % BLOCK
    value[:whole].view(-1, BLOCK).mul_(scale[: whole // BLOCK, None])
    if whole < value.numel():
        value[whole:].mul_(scale[-1])
    return value


@_operator(
    "(Tensor value, Tensor(a!) codes, Tensor(b!) scale, bool signed, int key, int element) -> ()",
    lambda value, codes, scale, signed, key, element: None,
    launches=lambda value, codes, scale, signed, *random: 27 + 2 * signed + 2 * _is_ragged(value),
    moved_bytes=_by_element(176),
    temporary_bytes=_by_element(10),
)
def write_blocks(value: Tensor, codes: Tensor, scale: Tensor, signed: bool, key: int, element: int) -> None:
    """Encode float32 as 8-bit codes, each block by its own largest value, rounded at random without bias."""
    octaves = SIGNED_OCTAVES if signed else UNSIGNED_OCTAVES
    num_elements = value.numel()
    if num_elements % BLOCK:
        value = F.pad(value, (0, -num_elements % BLOCK))
    share = value.abs().view(-1, BLOCK)
    torch.amax(share, 1, out=scale)
    share.div_(scale.clamp_min_(_SMALLEST_SCALE)[:, None]).add_(2.0**-octaves)
    bits = share.view(torch.int32).view(-1)
    noise = random_bits(16, key, element, bits.numel(), bits.device).bitwise_left_shift_(_CODE_SHIFT - 16)
    bits.sub_(_floor_bits(octaves)).add_(noise).bitwise_right_shift_(_CODE_SHIFT)
    if signed:
        sign = torch.bitwise_right_shift(value.view(torch.int32), 31, out=noise)
        bits.bitwise_xor_(sign).sub_(sign)
    else:
        bits.clamp_(min=1)
    codes.copy_(bits[:num_elements])


def _floor_bits(octaves: int) -> int:
    """Return the bits of ``2.0**-octaves``."""
    return (127 - octaves) << 23


def _keep_upper_half(bits: Tensor, addend: Tensor | int, weight: Tensor) -> None:
    """Write the upper half of ``bits + addend``; NaN stays NaN, though its bits might carry into the sign.

    Args:
        bits: bits of float32, as int32; left as they are.
        addend: from 0 to 0xFFFF.
        weight: bfloat16, written.
    """
    # Clamping once for positive numbers and, with the sign flipped, once for negative ones: four times as fast on the
    # CPU as calling isnan() and filling in.
    safe = bits.clamp(max=_LAST_NAN).bitwise_xor_(_SIGN).clamp_(max=_LAST_NAN).bitwise_xor_(_SIGN)
    weight.view(torch.int16).copy_(safe.add_(addend).bitwise_right_shift_(16))
