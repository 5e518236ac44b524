"""Rates of this machine's GPU that the clock reckons with, as shares of the catalogue's peaks; seconds to run.

    python scripts/calibrate rates

Products of squares in bfloat16; the forward and backward pass of fused causal attention, by the FLOPs that the causal
half has; a copy on the device; copies from and to pinned memory; and the seconds that the host takes for an operator
whose kernel is over at once. Numbers of ``lowmem_ft/foundation/catalog/clock_rates.json`` can be compared with them.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
import torch.nn.functional as F
from command_line import parser_of
from lease_items.host import host_seconds, operators
from lease_items.parts import timed
from measured_on import measured_on, require_device

from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.virtual_gpu.replay.timing.links import pcie_rate

REPEATS = 20
ROWS, HEADS, TOKENS, HEAD_SIZE = 2, 32, 2048, 128


def main() -> None:
    """Print one JSON object."""
    parser_of(__doc__).parse_args()
    require_device("cuda")
    gpu = this_machines_gpu()
    peak, link = gpu.dense_flops["bfloat16"], pcie_rate(gpu)
    found = {
        **measured_on("cuda"),
        "products": {str(size): product(size) / peak for size in (2048, 4096, 8192, 16384)},
        "attention": {
            "forward": attention(backward=False) / peak,
            "backward": attention(backward=True) / peak,
        },
        "bandwidth": copy() / gpu.bandwidth,
        "host_link": {
            "to the device": transfer(to_device=True) / link,
            "back": transfer(to_device=False) / link,
        },
        "operator_seconds": host_seconds(operators, "cuda", REPEATS)["host_seconds"],
    }
    print(json.dumps(found, indent=1))


def product(size: int) -> float:
    """Return FLOPs a second of a product of two squares."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right)


def attention(*, backward: bool) -> float:
    """Return FLOPs a second of fused causal attention; of the backward pass alone, if asked."""
    shape = (ROWS, HEADS, TOKENS, HEAD_SIZE)
    query, key, value = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    flops = 4 * ROWS * HEADS * TOKENS**2 * HEAD_SIZE / 2
    if not backward:
        return flops / seconds_of(forward)
    output, d_output = forward(), torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    inputs = (query, key, value)
    return 2.5 * flops / seconds_of(lambda: torch.autograd.grad(output, inputs, d_output, retain_graph=True))


def copy() -> float:
    """Return bytes a second, read and written, of a copy of 2 GiB."""
    source = torch.empty(2**31, device="cuda", dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: target.copy_(source))


def transfer(*, to_device: bool) -> float:
    """Return bytes a second of a copy of 1 GiB between pinned memory and the device."""
    pinned = torch.zeros(2**30, dtype=torch.uint8).pin_memory()
    held = torch.empty_like(pinned, device="cuda")
    source, target = (pinned, held) if to_device else (held, pinned)
    return source.nbytes / seconds_of(lambda: target.copy_(source, non_blocking=True))


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds of the device's work in a call."""
    return timed([run], "cuda").device


if __name__ == "__main__":
    main()
