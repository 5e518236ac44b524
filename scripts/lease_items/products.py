"""Products of matrices at a layer's shapes, on random data and on rows that are all alike.

A GPU that multiplies constant data draws less power and keeps a higher clock, so that a run whose tokens are all the
same one is faster than any run on text. Each product is measured in bursts, and a layer's products in their order for
seconds on end, after which the clock is what the power limit leaves of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator

import torch
from calibrate import rates
from lease_items.parts import Numbers, Part, Setting, timed, wait
from lease_items.shapes import Shapes, shapes

DATA = ("random", "rows alike")
ROWS = (1, 2)
"""Rows of a micro-batch."""

SUSTAINED_SECONDS = 3.0

Product = tuple[str, Callable[[], object], float]
"""Name, call and FLOPs."""


def parts(setting: Setting) -> Iterator[Part]:
    """Yield what is measured: what tells constant data from random first."""
    size = shapes(tiny=setting.tiny)
    for data in DATA:
        yield Part(
            name=f"a layer's products for seconds on end, {data}",
            run=functools.partial(sustained, size, 1, data, setting),
            seconds=5,
            settings={"rows": 1, "row_tokens": size.row_tokens, "data": data},
        )
    for rows in ROWS:
        for data in DATA:
            yield Part(
                name=f"products in bursts, {rows} row{'s' * (rows > 1)}, {data}",
                run=functools.partial(in_bursts, size, rows, data, setting),
                seconds=2,
                settings={"rows": rows, "row_tokens": size.row_tokens, "data": data},
            )
    yield Part(name="copies from and to pinned memory", run=_host_link, seconds=3, needs_cuda=True)


def products_of_a_layer(size: Shapes, rows: int, data: str, device: str) -> Iterator[Product]:
    """Yield the products of a layer's forward and backward pass, each with a weight and activations of its own."""
    tokens = rows * size.row_tokens
    drawn = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
    for name, (inputs, outputs) in size.linear_layers().items():
        weight_OI = drawn(outputs, inputs) * 0.02
        input_NI, d_output_NO = (
            drawn(tokens, width) if data == "random" else drawn(1, width).repeat(tokens, 1)
            for width in (inputs, outputs)
        )
        flops = 2.0 * tokens * inputs * outputs
        yield f"{name} forward", functools.partial(torch.matmul, input_NI, weight_OI.t()), flops
        yield f"{name} input gradient", functools.partial(torch.matmul, d_output_NO, weight_OI), flops
        yield f"{name} weight gradient", functools.partial(torch.matmul, d_output_NO.t(), input_NI), flops


def in_bursts(size: Shapes, rows: int, data: str, setting: Setting) -> Numbers:
    """Return each product's FLOP/s."""
    return {
        "tflop_per_second": {
            name: flops / timed([run], setting.device, repeats=2 if setting.tiny else 8).device / 1e12
            for name, run, flops in products_of_a_layer(size, rows, data, setting.device)
        }
    }


def sustained(size: Shapes, rows: int, data: str, setting: Setting) -> Numbers:
    """Return the FLOP/s of a layer's products one after the other, for seconds."""
    products = list(products_of_a_layer(size, rows, data, setting.device))
    wanted = 0.05 if setting.tiny else SUSTAINED_SECONDS
    passes, begin = 0, time.perf_counter()
    while (seconds := time.perf_counter() - begin) < wanted:
        for _, run, _ in products:
            run()
        passes += 1
        if passes % 4 == 0:
            wait(setting.device)
    wait(setting.device)
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "tflop_per_second": passes * sum(flops for *_, flops in products) / seconds / 1e12,
    }


def _host_link() -> Numbers:
    return {
        "to_device_gb_per_second": rates.transfer(to_device=True) / 1e9,
        "to_host_gb_per_second": rates.transfer(to_device=False) / 1e9,
    }
