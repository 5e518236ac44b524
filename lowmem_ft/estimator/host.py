"""Host memory of a run beside what its trace shows: the interpreter, weights on their way, files being written."""

from __future__ import annotations

from lowmem_ft.models.saving import MAX_SHARD_BYTES
from lowmem_ft.units import MIB
from lowmem_ft.virtual_gpu.trace import Trace

PROCESS_BYTES = 450 * MIB
"""Python with torch, transformers, accelerate and datasets imported, before any model: 424 MiB resident measured for
``import lowmem_ft.training.loop`` (Linux x86-64, Python 3.11, torch 2.13.0+cpu, transformers 5.23.0, 2026-11-21)."""

CUDA_PROCESS_BYTES = 2048 * MIB
"""What CUDA's libraries add on the host: an allowance, 1.5 to 3 GiB resident in reports of users; not measured here."""

TENSORS_IN_FLIGHT = 2
"""Weights are read one tensor at a time while the one before is still being copied."""


def host_base_bytes(trace: Trace, *, on_gpu: bool) -> int:
    """The most host memory outside the trace: the process, and the larger of loading and saving.

    Args:
        trace: for the sizes of the weights.
        on_gpu: whether the weights live on a GPU; on a CPU they are part of the trace, and files are written from them.

    Returns:
        Bytes.
    """
    if not on_gpu:
        return PROCESS_BYTES
    sizes = [
        allocation.size_bytes
        for allocation in trace.timeline.allocations
        if allocation.category == "parameter"
    ]
    largest = max(sizes, default=0)
    loading = TENSORS_IN_FLIGHT * largest
    saving = min(
        sum(sizes), max(MAX_SHARD_BYTES, largest)
    )  # a file's tensors are copied to the host together
    return PROCESS_BYTES + CUDA_PROCESS_BYTES + max(loading, saving)
