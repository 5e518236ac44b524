"""``lowmem-ft gpus``: the GPUs that estimates and plans know, with prices."""

from __future__ import annotations

import dataclasses
from typing import Any

from lowmem_ft.cli.console.catalogue import Catalogue, show
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.units import GIB

_NOT_IN_JSON = ("nvlink", "held_by_others_bytes", "has_triton", "lacks", "segments_grow", "note")


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Print the catalogue's GPUs, or all that is known of one of them.

    Args:
        arguments: nothing, or a GPU's name, and ``--json``.

    Returns:
        The exit code, 0.
    """
    return show(_CATALOGUE, arguments)


def _row(gpu: Gpu) -> tuple[str, ...]:
    cheapest = gpu.cheapest_price
    return (
        gpu.name,
        f"{gpu.memory_bytes / GIB:.1f}",
        "{}.{}".format(*gpu.compute_capability),
        str(gpu.num_multiprocessors),
        f"{gpu.dense_flops['float16'] / 1e12:.0f}",
        f"{gpu.bandwidth / 1e9:.0f}",
        f"{gpu.pcie_generation}.0 x{gpu.pcie_lanes}",
        f"{cheapest.usd_per_hour:.2f}" if cheapest else "-",
        f"{cheapest.provider}, {cheapest.date}" if cheapest else "",
        str(len(gpu.prices) or "-"),
    )


def _details(gpu: Gpu) -> tuple[str, list[tuple[str, str]]]:
    prices = [
        (f"${price.usd_per_hour:.2f}", f"{price.provider}, {price.date}: {price.source}")
        for price in sorted(gpu.prices, key=lambda price: price.usd_per_hour)
    ]
    return f"{gpu.full_name}. On-demand price of one GPU for an hour:", prices or [("no known price", "")]


def _as_json(gpu: Gpu) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(gpu).items() if name not in _NOT_IN_JSON}


_CATALOGUE = Catalogue(
    key="gpus",
    name_help="a GPU's name, such as rtx-4090",
    description="List the GPUs that `lowmem-ft estimate --gpu NAME` knows, or show one with prices and sources.",
    epilog="memory: what CUDA can allocate, which is nvidia-smi's total minus what the driver keeps. TFLOPS: "
    "16-bit, dense, with float32 accumulation. compute: CUDA's compute capability; 8.0 and newer have "
    "bfloat16. $/h: the lowest known price, with its date; -: unknown.",
    load=load_gpus,
    find=find_gpu,
    as_json=_as_json,
    row=_row,
    columns=("GPU", "memory GiB", "compute", "SMs", "TFLOPS", "GB/s", "PCIe", "$/h from", "at", "offers"),
    left=("GPU", "PCIe", "at"),
    spare=("at", "offers", "SMs", "compute", "PCIe", "GB/s", "TFLOPS", "$/h from"),
    details=_details,
)
