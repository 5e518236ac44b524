"""Errors that mean a device's memory has run out: torch's own, and those of the libraries that it calls."""

from __future__ import annotations

import re

import torch

from lowmem_ft.foundation.units import MIB, format_bytes

_MESSAGES = re.compile(
    r"DefaultCPUAllocator: (can't allocate memory|not enough memory)"
    r"|CUDA (driver )?error: out of memory"  # of a call outside the allocator, such as the launch of a kernel
    r"|Triton Error \[CUDA\]: out of memory"  # while loading a kernel; cuGetErrorString, backends/nvidia/driver.c
    r"|\b(CUBLAS|CUSOLVER|CUSPARSE|CUFFT|CUDNN)_STATUS_ALLOC_FAILED\b|\bCUFFT_ALLOC_FAILED\b"
    r"|\bCUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED\b"
    r"|Cuda failure (2 )?'out of memory'|Failed to CUDA (calloc|malloc|host alloc)"  # of NCCL
)
"""The words by which libraries below torch report a failed allocation in a RuntimeError."""

_DID_NOT_START = re.compile(
    r"\b(CUBLAS|CUSOLVER|CUSPARSE|CUDNN)_STATUS_NOT_INITIALIZED\b"
    r"|\b(ncclUnhandledCudaError): Call to CUDA function failed\.\s*(Last error:)?\s*\Z"  # of NCCL, without detail
)
"""Their words if they could not start, for want of memory or because something is broken."""

LIBRARY_BYTES = 256 * MIB
"""Free memory above which a library that could not start lacked something else: one that starts takes tens of MiB
outside torch's allocator, and its kernels as much again."""


def is_failed_allocation(error: BaseException) -> bool:
    """Return whether memory ran out: torch has an error type for it on CUDA, the other cases are RuntimeErrors.

    For a library that could not start, the answer depends on what is free: call this before memory is given back.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    if _MESSAGES.search(str(error)) is not None:
        return True
    free = _free_bytes() if _DID_NOT_START.search(str(error)) is not None else None
    return free is not None and free < LIBRARY_BYTES


def library_that_did_not_start(error: BaseException) -> str | None:
    """Return the sentence about a library that could not start although memory is free; None for any other error."""
    found = _DID_NOT_START.search(str(error)) if isinstance(error, RuntimeError) else None
    if found is None or is_failed_allocation(error):
        return None
    name = f"{found[1]}_STATUS_NOT_INITIALIZED" if found[1] else found[2]
    free = _free_bytes()
    room = "" if free is None else f", and not because of memory: {format_bytes(free)} of the device are free"
    return (
        f"A library of CUDA could not start ({name}){room}. The driver or the library is broken, or an earlier kernel "
        "has failed. CUDA_LAUNCH_BLOCKING=1 names such a kernel (token numbers beyond the vocabulary are the usual "
        f"reason); otherwise check that nvidia-smi works and shows CUDA {torch.version.cuda} or newer, that "
        "LD_LIBRARY_PATH names no other CUDA, and restart the container or the machine."
    )


def _free_bytes() -> int | None:
    """Return free bytes of the current device by its driver, as memory that the allocator caches is lost to libraries.

    None: there is no CUDA here, or it does not answer.
    """
    try:
        return torch.cuda.mem_get_info()[0]
    except (RuntimeError, AssertionError):
        return None
