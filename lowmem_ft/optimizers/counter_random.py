"""Random bits that are a function of a counter: of seed, step, parameter and element, and of nothing else.

An element therefore gets the same bits on every device, for any chunk size, and again after a resume.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_WEYL = 0x9E3779B1
_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)
_AT_ONCE = 512


@dataclass(frozen=True)
class CounterRandom:
    """The random bits of one parameter in one optimizer step.

    Args:
        seed: the run's seed.
        step: the optimizer step of that parameter.
        parameter: its number in the optimizer.
        element: number of the first element of the chunk, counted in the flattened parameter.
    """

    seed: int
    step: int
    parameter: int
    element: int = 0

    def key(self, stream: int) -> int:
        """Return the key for :func:`random_bits`; users of the same elements take separate streams."""
        return self.keys()[stream]

    def keys(self) -> list[int]:
        """Return the keys of the streams 0 to 2."""
        return keys_of(self.seed, self.step, self.parameter)


def keys_of(seed: int, step: int, parameter: int) -> list[int]:
    """Return the keys of the streams 0 to 2 of one parameter in one step; see :class:`CounterRandom`."""
    return _keys_of_block(seed, step, parameter // _AT_ONCE)[parameter % _AT_ONCE]


@functools.lru_cache(maxsize=16)
def _keys_of_block(seed: int, step: int, block: int) -> list[list[int]]:
    """Return the keys of ``_AT_ONCE`` parameters: one by one, they would take longer than a launch."""
    parameters = np.arange(block * _AT_ONCE, (block + 1) * _AT_ONCE, dtype=np.uint64)
    keys: Any = np.zeros((1, 1), np.uint64)
    for part in (seed, seed >> 32, step, parameters[:, None], np.arange(3, dtype=np.uint64)):
        keys = _hash32(keys ^ _hash32((part + _WEYL) & 0xFFFFFFFF))
    return keys.tolist()


def random_bits(num_bits: int, key: int, element: int, num_elements: int, device: torch.device) -> Tensor:
    """Return independent uniform integers from 0 to below ``2**num_bits`` (int32).

    Args:
        num_bits: 8 or 16; four or two elements share one hash.
        key: from :meth:`CounterRandom.key`.
        element: number of the first element; elements 2**34 or 2**33 apart get equal bits.
        num_elements: elements of the chunk.
        device: the device to compute them on; int32 operations give the same on all.
    """
    shared = 32 // num_bits
    first_word, skipped = divmod(element, shared)
    num_words = -(-(skipped + num_elements) // shared)
    words = torch.arange(num_words, dtype=torch.int32, device=device)
    words.mul_(_as_int32(_WEYL)).add_(_as_int32(first_word * _WEYL + key))
    bits = _hash32_(words).view(torch.uint8 if num_bits == 8 else torch.int16)
    bits = bits[skipped : skipped + num_elements].to(torch.int32)
    return bits if num_bits == 8 else bits.bitwise_and_(0xFFFF)


def _hash32_(words: Tensor) -> Tensor:
    """Mix int32 words in place so that each bit of the result depends on every bit of the word.

    Source: Wellons, "Prospecting for Hash Functions" (lowbias32), 2018.
    """
    words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF))
    words.mul_(_as_int32(_MULTIPLIERS[0]))
    words.bitwise_xor_((words >> 15).bitwise_and_(0x1FFFF))
    words.mul_(_as_int32(_MULTIPLIERS[1]))
    return words.bitwise_xor_((words >> 16).bitwise_and_(0xFFFF))


def _hash32(word: Any) -> Any:
    """Return the same hash of numbers from 0 to below 2**32, of Python or of NumPy as uint64."""
    word = word ^ word >> 16
    word = word * _MULTIPLIERS[0] & 0xFFFFFFFF
    word ^= word >> 15
    word = word * _MULTIPLIERS[1] & 0xFFFFFFFF
    return word ^ word >> 16


def _as_int32(word: int) -> int:
    """Return the signed number with the same 32 bits."""
    return (word + 2**31) % 2**32 - 2**31
