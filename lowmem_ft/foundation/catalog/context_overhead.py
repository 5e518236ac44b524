"""Device bytes that a process holds outside torch's allocator."""

from __future__ import annotations

from collections.abc import Mapping

from lowmem_ft.foundation.catalog.gpu_spec import Gpu

_MIB = 2**20

BITSANDBYTES_BYTES = 4 * _MIB
"""Bytes of machine code that the driver loads with libbitsandbytes.

Its 26 MB (0.50 for CUDA 12.8) contain code for some seven architectures, of which one is loaded. An estimate from the
size of the file, not a measurement.
"""

NCCL_BYTES_OF_TWO = 544 * 10**6
NCCL_BYTES_OF_MORE = 688 * 10**6
"""Bytes of a communicator's channels and buffers, by the number of GPUs in it.

Source: nccl issue 964, measured on A100.
"""


def allocator_cap(process_bytes: int, overhead: Mapping[str, int]) -> int:
    """Return the bytes torch's allocator may hold for the process to stay within a budget; below 0 if none are left.

    Args:
        process_bytes: the budget.
        overhead: the result of :func:`process_overhead_bytes`.
    """
    return process_bytes - sum(overhead.values())


def process_overhead_bytes(gpu: Gpu | None, *, uses_bitsandbytes: bool, num_processes: int) -> dict[str, int]:
    """Return the bytes that a process holds on its GPU outside of tensors, by purpose.

    The context in the catalogue was read after training steps: it includes the kernels of torch and cuBLAS, which the
    driver loads when they are first called.

    Args:
        gpu: the GPU; None: the program runs on a processor, with no entry.
        uses_bitsandbytes: whether the run calls bitsandbytes' kernels.
        num_processes: number of GPUs of the run; with more than one, NCCL holds one communicator.

    Returns:
        An entry for each part that exists.
    """
    if gpu is None:
        return {}
    overhead = {"CUDA context": gpu.context_bytes}
    if uses_bitsandbytes:
        overhead["bitsandbytes"] = BITSANDBYTES_BYTES
    if num_processes > 1:
        overhead["NCCL"] = NCCL_BYTES_OF_TWO if num_processes == 2 else NCCL_BYTES_OF_MORE
    return overhead
