"""A CUDA device of this machine as a row of the catalogue, with the memory that it has now."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lowmem_ft.foundation.allocator_setting import segments_can_grow
from lowmem_ft.foundation.catalog.clock_rates import rates_of_estimates
from lowmem_ft.foundation.catalog.gpu_catalog import load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.catalog.this_host import with_host_here
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.uncertainty import ESTIMATED_CONTEXT_SHARE
from lowmem_ft.foundation.packages import kernel_packages_lacking, triton_lacks
from lowmem_ft.foundation.units import KIB, MIB

_FLOAT32_LANES = {(6, 0): 64, (7, 0): 64, (7, 5): 64, (8, 0): 64}
"""Fused multiply-adds in float32 that a multiprocessor starts in a cycle, by compute capability; 128 by any other.

Source: CUDA C++ Programming Guide, "Arithmetic Instructions".
"""

_CONTEXT_BYTES_PER_THREAD, _KERNEL_BYTES = 2 * KIB, 36 * MIB
"""The catalogue's estimate of a context that was never measured."""


def this_machines_gpu(device: torch.device | None = None) -> Gpu:
    """Return a CUDA device with the memory that its driver reports, and how much of it others hold.

    A GPU that the catalogue does not know has the memory, the bandwidth and the arithmetic that its driver reports; its
    nearest relative of the catalogue tells how much faster its matrix units are, and what no driver reports. Its
    ``note`` says so.

    Args:
        device: the device; None: the current one.

    Returns:
        The GPU, under the name of its row, or under its own.

    Raises:
        UserError: if the device has no memory of its own.
    """
    properties = torch.cuda.get_device_properties(device)
    if getattr(properties, "is_integrated", 0):
        raise UserError(
            f"A GPU needs memory of its own, got {properties.name}, which shares the host's: budgets and estimates "
            "would count it twice. Set training.use_cpu=true, or name another GPU, such as --gpu rtx-4090."
        )
    known = next(
        (gpu for gpu in load_gpus().values() if _bare(gpu.full_name) == _bare(properties.name)), None
    )
    gpu = _described(properties) if known is None else known
    return dataclasses.replace(
        gpu,
        full_name=properties.name,
        rates=with_host_here(gpu.rates, properties.name),
        memory_bytes=properties.total_memory,
        compute_capability=(properties.major, properties.minor),
        num_multiprocessors=properties.multi_processor_count,
        held_by_others_bytes=_held_by_others(device, gpu.context_bytes),
        has_triton=triton_lacks() is None,
        lacks=kernel_packages_lacking(),
        segments_grow=segments_can_grow(),
    )


def _bare(name: str) -> str:
    """Return a driver's name for a GPU without the maker and the line, which drivers have changed."""
    return " ".join(word for word in name.lower().split() if word not in ("nvidia", "tesla"))


def _described(properties: Any) -> Gpu:
    """Return a GPU that the catalogue does not know, by its driver's properties."""
    relative = _relative(properties)
    capability = (properties.major, properties.minor)
    lanes = _FLOAT32_LANES.get(capability, 128)
    hertz = 1e3 * (getattr(properties, "clock_rate", 0) or 0)
    bytes_per_cycle = 2 * (getattr(properties, "memory_bus_width", 0) or 0) / 8  # both edges of the clock
    bandwidth = 1e3 * (getattr(properties, "memory_clock_rate", 0) or 0) * bytes_per_cycle
    float32 = 2 * lanes * properties.multi_processor_count * hertz
    ratio = float32 / relative.dense_flops["float32"]
    dense_flops = {dtype: rate * ratio for dtype, rate in relative.dense_flops.items()}
    threads = getattr(properties, "max_threads_per_multi_processor", 2048) * properties.multi_processor_count
    of_relative = [
        *(["operations a second"] if not ratio else ["ratios of its types' operations"]),
        *(["bandwidth"] if not bandwidth else []),
        "host link",
    ]
    other = "" if relative.compute_capability == capability else ", of another architecture,"
    return dataclasses.replace(
        relative,
        name=_bare(properties.name).replace(" ", "-"),
        nvidia_smi_bytes=None,
        dense_flops=dense_flops if ratio else relative.dense_flops,
        bandwidth=bandwidth or relative.bandwidth,
        context_bytes=threads * _CONTEXT_BYTES_PER_THREAD + _KERNEL_BYTES,
        context_is_estimate=True,
        nvlink=0.0,
        rates=rates_of_estimates("", capability),
        prices=(),
        sources={},
        note=f"the catalogue does not know {properties.name}: memory and clocks are its own, and from {relative.name}"
        f"{other} come {', '.join(of_relative)}, so that seconds are a guess",
    )


def _relative(properties: Any) -> Gpu:
    """Return the GPU of the catalogue that is nearest by architecture, then by its line of products and its memory."""
    capability = (properties.major, properties.minor)
    is_geforce = "geforce" in properties.name.lower()

    def distance(gpu: Gpu) -> tuple[bool, bool, int, bool, int]:
        major, minor = gpu.compute_capability
        return (
            gpu.compute_capability != capability,
            major != capability[0],
            abs(10 * (major - capability[0]) + minor - capability[1]),
            ("GeForce" in gpu.full_name) != is_geforce,
            abs(gpu.memory_bytes - properties.total_memory),
        )

    return min(load_gpus().values(), key=distance)


def _held_by_others(device: torch.device | None, context_bytes: int) -> int:
    """Return bytes that are neither free nor this process's: those of other processes and displays.

    Reading them creates a context here, if the process has no context yet; its size is the catalogue's. An amount
    within the error of that size counts as a part of it.
    """
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device) - context_bytes
    return others if others > ESTIMATED_CONTEXT_SHARE * context_bytes else 0
