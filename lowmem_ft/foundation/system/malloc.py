"""Memory that libraries keep after use: the C library's heap, oneDNN's kernels."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from lowmem_ft.foundation.units import MIB

LARGEST_IN_HEAP_BYTES = 4 * MIB
"""Largest block in the heap, once :func:`keep_tensors_out_of_the_heap` has been called."""

_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` of ``malloc.h``."""

KERNELS_KEPT = 32
"""Compiled kernels that oneDNN keeps after :func:`keep_few_kernels`; a step of one shape has some twenty."""

_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables of oneDNN's cache, and of torch's cache above it; both keep 1,024 by default."""

_SETTINGS_OF_USERS = ("MALLOC_MMAP_THRESHOLD_", "mmap_threshold")
"""The environment variable that glibc reads, and the name of the same setting in its ``GLIBC_TUNABLES``."""


def return_free_memory() -> None:
    """Let the C library give freed memory back to the system.

    glibc keeps freed blocks in its heap, and cannot reuse them once something small is allocated between them: after a
    model of 800 MB had been moved, 600 MB remained.
    """
    trim = _function("malloc_trim")
    if trim is not None:
        trim(0)


def keep_tensors_out_of_the_heap() -> bool:
    """Let the C library request each block above :data:`LARGEST_IN_HEAP_BYTES` from the system, and free it there.

    Frees gaps between large tensors. By default, glibc takes blocks of up to 32 MiB from its heap once one of that size
    has been freed (mallopt(3), ``M_MMAP_THRESHOLD``), and the heap of a run on a CPU grows around whatever small
    allocation is in between.

    Costs page faults if a step's temporary tensors are larger, as the system zeroes such blocks each time. CPU seconds
    of a float32 step of SmolLM2-135M and the peak of its process, by the largest block in the heap
    (one run each, medians of its steps after the first, one thread, AMD EPYC, torch 2.13.0, 2026-11-24):

    - 4 rows of at most 136 tokens: 5.48 s and 2.74 GiB with 256 KiB; 4.10 s and 2.87 GiB with 4 MiB; 4.19 s and
      3.16 GiB with 8 MiB; 4.27 s and 3.21 GiB with 32 MiB; 4.23 s and 2.92 GiB as glibc has it
    - 4 rows of 256 tokens: 8.88 s and 3.62 GiB with 4 MiB; 8.81 s and 3.73 GiB with 32 MiB; 8.83 s and 3.74 GiB as
      glibc has it

    Returns:
        True if it does so now: not with another C library, nor if the environment has a setting of its own.
    """
    of_user = os.environ.get("GLIBC_TUNABLES", "") + "".join(
        name for name in os.environ if name in _SETTINGS_OF_USERS
    )
    set_option = _function("mallopt")
    if set_option is None or any(name in of_user for name in _SETTINGS_OF_USERS):
        return False
    return bool(set_option(_MMAP_THRESHOLD, LARGEST_IN_HEAP_BYTES))


def keep_few_kernels() -> None:
    """Make oneDNN keep few kernels, unless the environment sets a number; it reads that at its first matrix product.

    It compiles one for each shape of a product in 16 bits, and keeps half a MiB of each: 218 MiB for 400 lengths, and
    18 with this. Compiling one again takes less than a millisecond.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(KERNELS_KEPT))


def _function(name: str) -> Any:
    """Return a function of the C library; None if it has no such function."""
    return getattr(ctypes.CDLL(None), name, None)
