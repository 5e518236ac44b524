"""``lowmem-ft gpus``: the GPUs that estimates and plans know, with prices."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from lowmem_ft.catalog import Gpu, find_gpu, load_gpus
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.tables import print_filled, print_row, print_table
from lowmem_ft.foundation.units import GIB

COLUMNS = ("GPU", "memory GiB", "compute", "SMs", "TFLOPS", "GB/s", "PCIe", "$/h from", "at", "offers")
SPARE = ("at", "offers", "SMs", "compute", "PCIe", "GB/s", "TFLOPS", "$/h from")


@explains_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Print the catalogue's GPUs, or all that is known of one of them.

    Args:
        argv: nothing, or a GPU's name, and ``--json``; None: those of this process.

    Returns:
        The exit code, 0.
    """
    arguments = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    gpus = [find_gpu(arguments.gpu)] if arguments.gpu else list(load_gpus().values())
    if arguments.json:
        print(json.dumps({"schema": 1, "gpus": [_as_json(gpu) for gpu in gpus]}, indent=2))
        return 0
    if arguments.gpu:
        _print_details(gpus[0])
    else:
        print_table(COLUMNS, map(_row, gpus), left=("GPU", "PCIe", "at"), spare=SPARE)
    return 0


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


def _print_details(gpu: Gpu) -> None:
    print_row(COLUMNS, _row(gpu))
    print()
    print_filled(f"{gpu.full_name}. On-demand price of one GPU for an hour:")
    for price in sorted(gpu.prices, key=lambda price: price.usd_per_hour):
        dollars = f"${price.usd_per_hour:.2f}"
        print_filled(f"{dollars:<9}{price.provider}, {price.date}: {price.source}", indent="  ")
    if not gpu.prices:
        print("  no known price")
    print("Sources:")
    for field, source in gpu.sources.items():
        print_filled(f"{field}: {source}", indent="  ")


def _as_json(gpu: Gpu) -> dict[str, Any]:
    return {
        "name": gpu.name,
        "full_name": gpu.full_name,
        "memory_bytes": gpu.memory_bytes,
        "nvidia_smi_bytes": gpu.nvidia_smi_bytes,
        "compute_capability": list(gpu.compute_capability),
        "num_multiprocessors": gpu.num_multiprocessors,
        "dense_flops": dict(gpu.dense_flops),
        "bandwidth": gpu.bandwidth,
        "pcie_generation": gpu.pcie_generation,
        "pcie_lanes": gpu.pcie_lanes,
        "context_bytes": gpu.context_bytes,
        "prices": [vars(price) for price in gpu.prices],
        "sources": dict(gpu.sources),
    }


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft gpus",
        description="List the GPUs that `lowmem-ft estimate --gpu NAME` knows, or show one with prices and sources.",
        epilog="memory: what CUDA can allocate, which is nvidia-smi's total minus what the driver keeps. TFLOPS: "
        "16-bit, dense, with float32 accumulation. compute: CUDA's compute capability; 8.0 and newer have "
        "bfloat16. $/h: the lowest known price, with its date; -: unknown.",
    )
    parser.add_argument("gpu", nargs="?", metavar="NAME", help="a GPU's name, such as rtx-4090")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser
