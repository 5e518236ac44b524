"""What a process holds on a GPU outside torch's allocator."""

from __future__ import annotations

from collections.abc import Mapping

from lowmem_ft.catalog.gpu_spec import Gpu

_MIB = 2**20

BITSANDBYTES_BYTES = 4 * _MIB
"""Machine code that the driver loads with libbitsandbytes: 26 MB (0.50 for CUDA 12.8) hold some seven architectures, of
which one is loaded. An estimate from the size of the file, not a measurement."""

NCCL_BYTES_OF_TWO = 544 * 10**6
NCCL_BYTES_OF_MORE = 688 * 10**6
"""A communicator's channels and buffers, by the number of GPUs in it. Source: nccl issue 964, measured on A100."""


def allocator_cap(process_bytes: int, overhead: Mapping[str, int]) -> int:
    """What torch's allocator may hold so that the whole process stays within a budget; below 0 if nothing is left.

    Args:
        process_bytes: of the budget.
        overhead: what :func:`process_overhead_bytes` says.
    """
    return process_bytes - sum(overhead.values())


def process_overhead_bytes(gpu: Gpu, *, uses_bitsandbytes: bool, num_processes: int) -> dict[str, int]:
    """Bytes of a process on its GPU that no tensor accounts for, by what they are for.

    The context of the catalogue was read after training steps: kernels of torch and cuBLAS, which the driver loads
    when they are first called, are in it.

    Args:
        gpu: the GPU.
        uses_bitsandbytes: whether the run calls bitsandbytes' kernels.
        num_processes: GPUs of the run; with more than one, NCCL holds one communicator.

    Returns:
        A row for each part that is there.
    """
    overhead = {"CUDA context": gpu.context_bytes}
    if uses_bitsandbytes:
        overhead["bitsandbytes"] = BITSANDBYTES_BYTES
    if num_processes > 1:
        overhead["NCCL"] = NCCL_BYTES_OF_TWO if num_processes == 2 else NCCL_BYTES_OF_MORE
    return overhead
