"""A CUDA device of this machine as a row of the catalogue, with the memory that it has now."""

from __future__ import annotations

import dataclasses

import torch

from lowmem_ft.catalog.gpu_catalog import load_gpus
from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.allocator_setting import segments_can_grow
from lowmem_ft.foundation.packages import triton_lacks
from lowmem_ft.memory.uncertainty import ESTIMATED_CONTEXT_SHARE


def this_machines_gpu(device: torch.device | None = None) -> Gpu:
    """Return a CUDA device with the memory that its driver reports, and how much of it others hold.

    For a GPU that the catalogue does not know, its nearest relative by compute capability and memory fills the gaps.

    Args:
        device: the device; None: the current one.

    Returns:
        The GPU, under the name of its row or its relative's.
    """
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)

    def is_namesake(gpu: Gpu) -> bool:
        return gpu.full_name.lower() in properties.name.lower()

    def distance(gpu: Gpu) -> tuple[bool, bool, int]:
        return (
            not is_namesake(gpu),
            gpu.compute_capability != capability,
            abs(gpu.memory_bytes - properties.total_memory),
        )

    nearest = min(load_gpus().values(), key=distance)
    return dataclasses.replace(
        nearest,
        full_name=properties.name,
        memory_bytes=properties.total_memory,
        compute_capability=capability,
        num_multiprocessors=properties.multi_processor_count,
        held_by_others_bytes=_held_by_others(device, nearest.context_bytes),
        has_triton=triton_lacks() is None,
        segments_grow=segments_can_grow(),
        context_is_estimate=nearest.context_is_estimate or not is_namesake(nearest),
    )


def _held_by_others(device: torch.device | None, context_bytes: int) -> int:
    """Return bytes that are neither free nor this process's: those of other processes and displays.

    Reading them creates a context here, if the process has no context yet; its size is the catalogue's. An amount
    within the error of that size counts as a part of it.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device) - context_bytes
    return others if others > ESTIMATED_CONTEXT_SHARE * context_bytes else 0
