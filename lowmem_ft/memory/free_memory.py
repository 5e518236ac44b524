"""Memory that libraries keep of what they no longer need: the C library's heap, oneDNN's kernels."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from lowmem_ft.units import KIB

LARGEST_IN_HEAP_BYTES = 256 * KIB
"""Of a block, once :func:`keep_tensors_out_of_the_heap` has been called."""

_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of ``malloc.h``."""

KERNELS_KEPT = 32
"""Of those that oneDNN compiles, once :func:`keep_few_kernels` has been called; a step of one shape has some twenty."""

_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""oneDNN's own, and that of torch's layer above it; both keep 1,024 where nobody says otherwise."""

_SETTINGS_OF_USERS = ("MALLOC_MMAP_THRESHOLD_", "mmap_threshold")
"""The environment variable that glibc reads, and what names the same in its ``GLIBC_TUNABLES``."""


def return_free_memory() -> None:
    """Let the C library give freed memory back to the system.

    glibc keeps blocks of its heap for itself, and finds no use for them once something small lies in their midst:
    600 MB were left of a model of 800 MB after it had been moved.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def keep_tensors_out_of_the_heap() -> bool:
    """Let the C library ask the system for each block above :data:`LARGEST_IN_HEAP_BYTES`, and give it back when freed.

    Frees the gaps between tensors. Left alone, glibc takes blocks of up to 32 MiB from its heap once one of that size
    has been freed (mallopt(3), ``M_MMAP_THRESHOLD``), and the heap of a run on a CPU grows around whatever small thing
    lies between: SmolLM2-135M's process held 3,272 MiB at the peak of four float32 steps, and holds 2,805.

    Costs page faults, as the system hands out such blocks as zeros, each anew: five float32 steps of SmolLM2-135M made
    151 tokens a second, and 199 with glibc's own threshold at 32 MiB, at a peak of 2.76 and 3.17 GiB (mean of two runs
    each, AMD EPYC, two cores, torch 2.13.0, 2026-11-24). ``MALLOC_MMAP_THRESHOLD_=33554432`` gets that back.

    Returns:
        Whether it does so now: not with another C library, nor where the environment has a setting of its own.
    """
    of_user = os.environ.get("GLIBC_TUNABLES", "") + "".join(
        name for name in os.environ if name in _SETTINGS_OF_USERS
    )
    set_option = _function("mallopt")
    if set_option is None or any(name in of_user for name in _SETTINGS_OF_USERS):
        return False
    return bool(set_option(_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES))


def keep_few_kernels() -> None:
    """Let oneDNN forget kernels, unless the environment says how many it keeps; read at its first matrix product.

    It compiles one for each shape of a product in 16 bits, and keeps half a MiB of each: 218 MiB of 400 lengths, and
    18 with this. Compiling one again takes less than a millisecond.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(KERNELS_KEPT))


def _function(name: str) -> Any:
    """Of the C library; None in one that has no such function."""
    return getattr(ctypes.CDLL(None), name, None)
