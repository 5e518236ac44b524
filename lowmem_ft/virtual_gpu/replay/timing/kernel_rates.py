"""Operations and bytes a second that a kernel reaches on a GPU, by its kind and sizes.

A product on tensor cores is cut into tiles, which the multiprocessors compute in waves: the last wave, the last tile of
a row and each tile's beginning and end take as long as if they were full. Attention takes longer for a query with few
keys, whose softmax and whose reading of the query are not spread over many products.
"""

from __future__ import annotations

import torch

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.virtual_gpu.calls.kernel_kinds import KernelKind

_TILES = ((128, 1.0), (64, 0.9))
"""Rows and columns of a tile, and the share of the rate that the largest ones reach."""
_PARTS = (1, 2, 4, 8)
"""Numbers of parts that an inner dimension is cut into where there are fewer tiles than multiprocessors."""
_LEAST_PART = 256
_QUERIES = 128
"""Queries that one block of attention has."""
_SMALL_HEAD = 128
"""Size of a head below which attention reaches less."""
_FLOAT8_SINCE = (8, 9)


def matmul_rate(gpu: Gpu, dtype: str) -> float:
    """Return the operations a second that large matrix products of a type reach.

    A type that the hardware lacks runs on the units for float32, as bfloat16 does before compute capability 8.0.
    float32 is TF32 where torch is set to allow it. Tensor cores multiply int8, and float8 where they have it, twice as
    fast as float16.

    Args:
        gpu: the GPU.
        dtype: type of the operands, such as ``bfloat16``.

    Returns:
        The rate.
    """
    if dtype == "float32" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        dtype = "tf32"
    rates, half = gpu.dense_flops, gpu.dense_flops.get("float16", 0.0)
    if dtype.startswith("float8") and gpu.compute_capability >= _FLOAT8_SINCE:
        return 2 * half * gpu.rates.float8_products
    rate = 2 * half if dtype == "int8" else rates.get(dtype)
    if not rate or dtype == "float32":
        return rates["float32"] * gpu.rates.float32_products
    return rate * gpu.rates.products


def arithmetic_rate(gpu: Gpu, kind: KernelKind, dtype: str, shape: tuple[int, ...]) -> float:
    """Return the operations a second that a kernel reaches where no bandwidth bounds it.

    Args:
        gpu: the GPU.
        kind: the kernel's kind.
        dtype: type of the operands; empty where there are no products.
        shape: its sizes; empty: they are large, or not known.
    """
    if not dtype:
        return 1.0
    rate = matmul_rate(gpu, dtype)
    if kind in ("attention", "attention backward"):
        return rate / _share_of_products(gpu, dtype) * _share_of_attention(gpu, kind, shape)
    if kind == "products" and shape and dtype != "float32":  # whose kernels have tiles of other sizes
        return rate * _filled_share(gpu, shape)
    return rate


def traffic_rate(gpu: Gpu, kind: KernelKind) -> float:
    """Return the bytes a second that a kernel of a kind reads and writes where no arithmetic bounds it."""
    return gpu.bandwidth * gpu.rates.bandwidth * gpu.rates.traffic.get(kind, 1.0)


def _share_of_products(gpu: Gpu, dtype: str) -> float:
    return gpu.rates.float32_products if dtype == "float32" else gpu.rates.products


def _share_of_attention(gpu: Gpu, kind: KernelKind, shape: tuple[int, ...]) -> float:
    """Return the share of the peak that fused attention reaches."""
    rates = gpu.rates
    is_backward = kind == "attention backward"
    share = rates.attention * (rates.attention_backward if is_backward else 1.0)
    if not shape:
        return share
    heads, queries, keys, head_dim = shape
    half = rates.backward_keys if is_backward else rates.attention_keys
    if head_dim < _SMALL_HEAD:
        share *= rates.small_heads
    blocks = heads * -(-queries // _QUERIES)
    return share * keys / (keys + half) * min(1.0, blocks / gpu.num_multiprocessors)


def _filled_share(gpu: Gpu, shape: tuple[int, ...]) -> float:
    """Return the share of the largest products' rate that one of these sizes reaches, with the best tiles for it."""
    number, rows, columns, inner = shape
    least = float("inf")
    for tile, share in _TILES:
        tiles = number * -(-rows // tile) * -(-columns // tile)
        for parts in _PARTS:
            if parts > 1 and inner < parts * _LEAST_PART:
                break
            waves = -(-tiles * parts // gpu.num_multiprocessors)
            work = waves * gpu.num_multiprocessors * tile * tile * (inner / parts + gpu.rates.inner_dimension)
            least = min(least, work / share)
    return number * rows * columns * inner / least
