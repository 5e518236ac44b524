"""What the C library has been given back, and keeps."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Let the C library give freed memory back to the system.

    glibc keeps tensors of less than 32 MiB for itself, and finds no use for them once something small lies in their
    midst: 600 MB were left of a model of 800 MB after it had been moved.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # not in every C library
    if trim is not None:
        trim(0)
