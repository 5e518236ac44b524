"""Operators of bitsandbytes whose CUDA kernels make tensors of their own, written out as the steps they take.

Its fake rules give the results only. Sources: bitsandbytes 0.50.2, ``backends/cuda/ops.py`` and
``backends/default/ops.py``.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_ft.virtual_gpu.calls.active import active_gpu

MOST_OUTLIER_COLUMNS = 7
"""Columns that an 8-bit layer is assumed to compute in 16 bits; the real number depends on values.

Up to 13B parameters no layer's input has more. Source: Dettmers et al., "LLM.int8()", 2022, section 3.2.
"""


@functools.cache
def register_operator_steps() -> torch.library.Library:
    """Give the virtual device the steps of these operators; the registration lasts as long as the returned library."""
    library = torch.library.Library("bitsandbytes", "IMPL")
    for name, steps in {
        "gemm_4bit": _gemm_4bit,
        "int8_vectorwise_quant": _int8_vectorwise_quant,
        "int8_vectorwise_dequant": _int8_vectorwise_dequant,
        "int8_scaled_mm": _int8_scaled_mm,
        "int8_mm_dequant": _int8_mm_dequant,
        "int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
    }.items():
        # This key precedes dispatch modes, which therefore see the steps. The operators have no derivatives.
        library.impl(name, steps, "AutogradPrivateUse1")
    return library


def _gemm_4bit(
    inputs: Tensor,
    packed: Tensor,
    shape: list[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Dequantise the whole weight, then multiply, as CUDA does above 1536 tokens.

    Below, some GPUs and shapes have a fused kernel. This does not underestimate memory, and a training step's peak is
    the same: its backward pass dequantises the weight in any case.
    """
    ops = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        unshifted = ops.dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = unshifted + absmax_offset
    weight = ops.dequantize_4bit(packed, absmax, blocksize, quant_type, shape, inputs.dtype)
    return F.linear(inputs, weight, bias)


def _int8_vectorwise_quant(values: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows in 8 bits, their scales, and the columns with outliers, which are zeroed."""
    with torch._C._AutoDispatchBelowAutograd():
        rows, scales, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(values, 0.0)
    if threshold == 0.0:
        return rows, scales, None
    outliers = values.abs() >= threshold
    outliers.any().item()  # the host waits for the answer
    count = min(MOST_OUTLIER_COLUMNS, values.shape[-1])
    active_gpu().say(f"8-bit layers: {count} outlier columns assumed in each layer's input")
    columns = values.new_empty(count, dtype=torch.int64)
    rows[:, columns] = 0
    return rows, scales, columns


def _int8_vectorwise_dequant(rows: Tensor, scales: Tensor) -> Tensor:
    return rows * scales.view(-1, 1) * (1 / 127)


def _int8_scaled_mm(
    inputs: Tensor,
    weight: Tensor,
    input_scales: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    ops = torch.ops.bitsandbytes
    products = ops.int8_linear_matmul(inputs, weight)
    return ops.int8_mm_dequant(products, input_scales, weight_scales, dtype=dtype, bias=bias)


def _int8_mm_dequant(
    products: Tensor,
    row_scales: Tensor,
    column_scales: Tensor,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return float16 products with a float16 bias, as the kernel does, then add and cast for other types."""
    with torch._C._AutoDispatchBelowAutograd():
        outputs = torch.ops.bitsandbytes.int8_mm_dequant(
            products, row_scales, column_scales, dtype=torch.float16
        )
    if bias is not None and bias.dtype != torch.float16:
        outputs.add_(bias)
    return outputs.to(dtype or torch.float16)


def _int8_mixed_scaled_mm(
    inputs: Tensor,
    rows: Tensor,
    weight: Tensor,
    row_scales: Tensor,
    weight_scales: Tensor,
    outlier_columns: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Multiply all columns in 8 bits, and add a 16-bit product of those with outliers."""
    ops = torch.ops.bitsandbytes
    if outlier_columns is None or outlier_columns.numel() == 0:
        product = ops.int8_scaled_mm(rows, weight, row_scales, weight_scales, bias=bias, dtype=inputs.dtype)
        return product, inputs.new_empty(0)
    outliers = inputs[:, outlier_columns].contiguous()
    columns = ops.int8_vectorwise_dequant(weight[:, outlier_columns].contiguous(), weight_scales)
    columns = columns.to(inputs.dtype).t()
    product = ops.int8_scaled_mm(rows, weight, row_scales, weight_scales, bias=bias, dtype=inputs.dtype)
    return product.addmm(outliers, columns), outliers
