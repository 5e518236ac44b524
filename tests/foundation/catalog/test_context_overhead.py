"""Bytes that a process holds outside torch's allocator."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.catalog.context_overhead import process_overhead_bytes
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu

GPU = find_gpu("a100-80gb")


@pytest.mark.parametrize("num_processes, nccl_bytes", [(2, 544e6), (3, 688e6), (4, 688e6), (8, 688e6)])
def test_a_communicator_of_more_than_two_gpus_takes_more(num_processes, nccl_bytes):
    """As read with nvidia-smi on A100 (nccl issue 964)."""
    overhead = process_overhead_bytes(GPU, uses_bitsandbytes=False, num_processes=num_processes)
    assert overhead == {"CUDA context": GPU.context_bytes, "NCCL": nccl_bytes}


def test_a_process_alone_has_its_context_and_a_processor_nothing():
    assert process_overhead_bytes(GPU, uses_bitsandbytes=False, num_processes=1).keys() == {"CUDA context"}
    assert process_overhead_bytes(None, uses_bitsandbytes=True, num_processes=4) == {}
