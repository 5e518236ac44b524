"""Memory that CUDA's kernels take for themselves: while they run, or from the first call to the end of the process.

No tensor of the program represents it, so a trace cannot see it: each operator has one rule, taken from the code that
allocates the memory. Left out is what stays below 1 MiB in the training of language models: reductions, sorts of
indices, gradients of norms' weights, and the split keys of flash attention where there are fewer blocks than
multiprocessors.
Shapes: B batch, H heads, T query tokens, S key tokens, D head size; V x E for a matrix of embeddings.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.attention.varlen  # noqa: F401 - brings its operators
from torch import Tensor

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.tensors.backward_detection import is_in_backward
from lowmem_ft.foundation.tensors.operator_costs import registered_cost
from lowmem_ft.foundation.upstream.torch_version import TORCH_VERSION

aten = torch.ops.aten

_FLOAT = 4
_LONG = 8
_KIB = 1024


def workspace_bytes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, gpu: Gpu
) -> tuple[int, ...]:
    """Return the sizes of the buffers that an operator's CUDA kernel takes from torch's allocator and then gives back.

    Args:
        func: the operator, such as ``torch.ops.aten.mm.default``.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned.
        gpu: the GPU it runs on.

    Returns:
        One size in bytes for each buffer; they are live together, and at the same time as the result.
    """
    cost = registered_cost(func)
    if cost is not None:
        size = cost.temporary_bytes(*args, **kwargs)
        return (size,) if size else ()
    rule = _WORKSPACES.get(func)
    if rule is None:
        return ()
    return tuple(size for size in rule(_by_name(func, args, kwargs), result, gpu) if size)


def persistent_workspaces(func: Any, stream: int, gpu: Gpu) -> Iterator[tuple[object, int]]:
    """Yield the buffers that cuBLAS keeps from the first matrix product on: one for each thread and stream.

    Autograd runs the backward pass in a thread of its own, whose products get a second buffer.
    Source: pytorch, aten/src/ATen/cuda/CublasHandlePool.cpp and CUDABlas.cpp (gemm_and_bias).

    Args:
        func: the operator.
        stream: the stream it runs on.
        gpu: the GPU it runs on.

    Yields:
        A key that tells buffers apart, and the bytes of the buffer.
    """
    if func not in _MATRIX_PRODUCTS:
        return
    thread = "autograd" if is_in_backward() else "main"
    yield ("cublas", thread, stream), cublas_workspace_bytes(gpu.compute_capability)
    if func is aten.addmm.default:  # whose bias cuBLASLt adds within the product
        yield ("cublaslt", thread, stream), _cublaslt_workspace_bytes(gpu.compute_capability)


CUBLAS_WORKSPACES_BYTES = ((2 * 4096 + 8 * 16) * _KIB, 32 * 1024 * _KIB)
"""Bytes of the workspace that torch gives cuBLAS: until Ampere, and from Hopper on."""


def cublas_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return the bytes torch gives cuBLAS: CUBLAS_WORKSPACE_CONFIG, or 32 MiB from Hopper on and 8.125 MiB before."""
    configured = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if configured:
        return sum(int(size) * int(count) for size, count in configured) * _KIB
    # torch before 2.12 looks for Hopper alone, and gives Blackwell as little as Ampere.
    is_large = compute_capability == (9, 0) or (compute_capability >= (10, 0) and TORCH_VERSION >= (2, 12))
    return CUBLAS_WORKSPACES_BYTES[is_large]


def _cublaslt_workspace_bytes(compute_capability: tuple[int, int]) -> int:
    """Return the bytes torch gives cuBLASLt, which fuses a bias: CUBLASLT_WORKSPACE_SIZE in KiB, or 1 MiB."""
    wanted = int(os.environ.get("CUBLASLT_WORKSPACE_SIZE", "1024")) * _KIB
    return min(wanted, cublas_workspace_bytes(compute_capability))


_MATRIX_PRODUCTS = frozenset(
    {
        *(aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default, aten.addmv.default),
        *(aten.addmm.default, aten.addmm_.default, aten.baddbmm.default, aten.baddbmm_.default),
        *(aten.mm.out, aten.bmm.out, aten.addmm.out, aten.baddbmm.out),
        *(aten.mm.dtype, aten.mm.dtype_out, aten.addmm.dtype, aten.addmm.dtype_out),
    }
)


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = (argument.name for argument in func._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


# --- attention --------------------------------------------------------------------------------------------------------


def _flash_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Sum the gradient of the queries in float32, and that of shared key heads head by head.

    Source: pytorch, aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd.
    """
    batch, heads, tokens, size = call["query"].shape
    rows = batch * heads * _round_up(tokens, 128)
    yield rows * _FLOAT  # softmax_d
    yield rows * _flash_head_size(size) * _FLOAT * _determinism_splits(batch * heads, gpu)  # dq_accum
    yield from _expanded_key_heads(call["query"], call["key"], call["value"])
    yield from _contiguous_copies(call["grad_out"].transpose(1, 2), call["out"].transpose(1, 2))


def _flash_varlen_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take the buffers of :func:`_flash_backward` for packed documents, T x H x D, each rounded up to 128 tokens.

    Source: the same file, mha_varlen_bwd; without boundaries, B x T x H x D and mha_bwd.
    """
    query, boundaries = call["query"], call["cum_seq_q"]
    heads, size = query.shape[-2:]
    if boundaries is None:
        batch, tokens = query.shape[:2]
        rows = batch * heads * _round_up(tokens, 128)
    else:
        batch = boundaries.numel() - 1
        # The lengths are on the device, where the host does not look: a tile more for each document is always enough.
        rows = heads * (query.size(0) + 128 * batch)
    yield rows * _FLOAT
    yield rows * _flash_head_size(size) * _FLOAT * _determinism_splits(batch * heads, gpu)
    if call["key"].size(-2) != heads:
        for operand in (call["key"], call["value"]):
            yield operand.numel() // operand.size(-2) * heads * operand.element_size()
    yield from _contiguous_copies(call["grad_out"], call["out"])


def _torch_varlen_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take the buffers of the same kernel, which has another name here.

    Source: pytorch, torch/nn/attention/varlen.py.
    """
    yield from _flash_varlen_backward(call | {"cum_seq_q": call["cu_seq_q"]}, result, gpu)


def _cudnn_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take the workspace of cuDNN, as its graph of the backward pass lays it out.

    Source: cudnn-frontend, node/scaled_dot_product_flash_attention.h: softmax_sum, dQ_accum, dK and dV of all heads.
    """
    query, key, value = call["query"], call["key"], call["value"]
    rows = math.prod(query.shape[:3])
    workspace = rows * _FLOAT + query.numel() * _FLOAT
    yield workspace + sum(_expanded_key_heads(query, key, value))


def _efficient_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take row sums, and a workspace that sums tiles of the gradients in float32.

    Source: pytorch, aten/src/ATen/native/transformers/cuda/attention_backward.cu and
    mem_eff_attention/kernel_backward.h (``workspace_size``, ``kKernelComputesDelta``).
    """
    query, key, value = call["query"], call["key"], call["value"]
    batch, heads, tokens, size = query.shape
    block_rows, block_columns, largest_head = _efficient_tile(
        query.dtype, max(size, value.size(-1)), gpu.compute_capability
    )
    is_half = query.dtype != torch.float32
    # A tile that holds a whole head sums the gradients of keys and values in registers.
    in_registers = is_half and largest_head <= block_rows
    tiles_q = math.ceil(tokens / block_rows) * math.ceil(size / 64)
    elements = tiles_q * (block_rows * 64 + 4)  # 4: lock and counter
    if not in_registers:
        splits = max(1, min(math.ceil(key.size(2) / block_columns), 200 // (batch * heads)))
        if torch.are_deterministic_algorithms_enabled():
            splits = 1  # several would add to the queries' gradient in any order
        widths = _round_up(size, block_rows) + _round_up(value.size(-1), block_rows)
        # In float32, the gradients themselves take the sums.
        elements += splits * block_columns * widths if is_half else 0
    workspace = batch * heads * _round_up(elements, 4) * _FLOAT
    # In float32 and in large heads on Volta, torch multiplies output and gradient first; other kernels do so inside.
    computes_row_sums = is_half and (in_registers or not (7, 0) <= gpu.compute_capability < (7, 5))
    products = 0 if computes_row_sums else call["grad_out_"].numel() * _FLOAT
    yield batch * heads * tokens * _FLOAT  # delta
    yield max(workspace, products)  # the products are freed before the workspace is allocated


def _efficient_tile(
    dtype: torch.dtype, head_size: int, compute_capability: tuple[int, int]
) -> tuple[int, int, int]:
    """Return rows and columns of the tile, and the largest head size, of the first kernel that fits shared memory.

    Source: pytorch, mem_eff_attention/kernels/cutlassB.h.
    """
    for largest in (32, 64):
        if head_size <= largest:
            return 64, 64, largest
    has_much_shared_memory = compute_capability in ((8, 0), (9, 0), (10, 0), (10, 3))
    if dtype == torch.float32:
        rows = 128 if has_much_shared_memory else 64
        return rows, 64, 128 if head_size <= 128 else 65536
    if head_size <= 96 and compute_capability in ((8, 6), (8, 9)):
        return 128, 64, 96
    if head_size <= 128:
        return (128, 128, 128) if has_much_shared_memory else (64, 64, 128)
    return (128 if has_much_shared_memory else 64), 64, 65536


def _expanded_key_heads(query_BHTD: Tensor, key_BHSD: Tensor, value_BHSD: Tensor) -> Iterator[int]:
    """Take gradients of keys and values for every query head where heads share them; summed at the end."""
    heads = query_BHTD.size(1)
    for operand in (key_BHSD, value_BHSD):
        if operand.size(1) != heads:
            yield operand.numel() // operand.size(1) * heads * operand.element_size()


def _contiguous_copies(*tensors: Tensor) -> Iterator[int]:
    for tensor in tensors:
        if not tensor.is_contiguous():
            yield tensor.numel() * tensor.element_size()


def _flash_head_size(size: int) -> int:
    return _round_up(size, 32) if size <= 192 else 256


def _determinism_splits(batch_heads: int, gpu: Gpu) -> int:
    """Return into how many buffers deterministic sums go first."""
    if not torch.are_deterministic_algorithms_enabled():
        return 1
    return math.ceil(gpu.num_multiprocessors / batch_heads)


# --- softmax ----------------------------------------------------------------------------------------------------------


def _softmax(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take contiguous copies, as the kernels of softmax and log-softmax read rows end to end.

    Source of this and the next two: pytorch, aten/src/ATen/native/cuda/SoftMax.cu.
    """
    yield from _contiguous_copies(call["self"])


def _softmax_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take the product of the gradient and the probabilities, in a buffer as large as either."""
    gradient, output = call["grad_output"], call["output"]
    yield gradient.numel() * max(gradient.element_size(), output.element_size())
    yield from _contiguous_copies(gradient, output)


def _log_softmax_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    yield from _contiguous_copies(call["grad_output"], call["output"])


# --- recurrent layers -------------------------------------------------------------------------------------------------


def _recurrent_layers(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take the weights once more, and rows that lie step by step.

    In the run of ``kernels/cudnn_operators.py``, cuDNN's workspace was 1.46 and 1.45 times as large as the weights.
    Source of the copies: pytorch, aten/src/ATen/native/cudnn/RNN.cpp.
    """
    yield sum(weight.numel() * weight.element_size() for weight in call["weight"])
    yield from _contiguous_copies(_step_by_step(call["input"], call))


def _recurrent_layers_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take the same, the gradient step by step, and zeros for gradients that are not there."""
    yield from _recurrent_layers(call, result, gpu)
    if call["grad_output"] is not None:
        yield from _contiguous_copies(_step_by_step(call["grad_output"], call))
    for of, gradient in (("output", "grad_output"), ("hx", "grad_hy"), ("cx", "grad_cy")):
        if call[of] is not None and call[gradient] is None:
            yield call[of].numel() * call[of].element_size()


def _step_by_step(tensor: Tensor, call: dict[str, Any]) -> Tensor:
    return tensor.transpose(0, 1) if call["batch_first"] and not call["batch_sizes"] else tensor


# --- other operators --------------------------------------------------------------------------------------------------

_EMBEDDING_ROWS_WITHOUT_SORT = 3072
_EMBEDDING_ROWS_A_THREAD = 10


def _embedding_backward(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Beyond 3072 tokens, sum the gradient over sorted indices, through partial sums in float32.

    Source: pytorch, aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu. The sort itself takes as
    much again as its keys and values: an upper bound.
    """
    indices, grad_output = call["indices"], call["grad_output"]
    yield from _contiguous_copies(grad_output)
    num_indices = indices.numel()
    if num_indices <= _EMBEDDING_ROWS_WITHOUT_SORT:
        return
    yield from [num_indices * indices.element_size()] * 3  # sorted, original, offsets of segments
    num_segments = min(num_indices, call["num_weights"])
    yield from [num_segments * indices.element_size()] * 2
    num_partial = num_indices // _EMBEDDING_ROWS_A_THREAD + num_segments
    yield num_partial * indices.element_size()
    yield num_partial * grad_output.size(-1) * max(_FLOAT, grad_output.element_size())


_FOREACH_CHUNK = 65536


def _foreach_norm(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take a partial norm for each chunk, with room for the largest tensor's chunks in every row.

    Source: pytorch, aten/src/ATen/native/cuda/ForeachReduceOp.cu.
    """
    tensors = call["self"]
    most_chunks = max((math.ceil(tensor.numel() / _FOREACH_CHUNK) for tensor in tensors), default=0)
    yield len(tensors) * most_chunks * max(_FLOAT, tensors[0].element_size() if tensors else 0)


def _index_put(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Accumulate over sorted linear indices: the indices, sorted, their order, and the sort's own copies.

    Source: pytorch, aten/src/ATen/native/cuda/Indexing.cu, index_put_with_sort_kernel.
    """
    if call.get("accumulate"):
        num_indices = max((index.numel() for index in call["indices"] if index is not None), default=0)
        yield from [num_indices * _LONG] * 5


def _copy(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    """Take a contiguous copy where a copy between host and device changes the type or the layout.

    Source: pytorch, aten/src/ATen/native/cuda/Copy.cu, copy_requires_temporaries.
    """
    target, source = call["self"], call["src"]
    if target.device.type == source.device.type:
        return
    if target.dtype == source.dtype and target.is_contiguous() and source.is_contiguous():
        return
    if target.device.type == "cpu":
        if target.dtype != source.dtype or not source.is_contiguous():
            yield target.numel() * target.element_size()
    elif not target.is_contiguous():
        yield target.numel() * target.element_size()


def _to_copy(call: dict[str, Any], result: Any, gpu: Gpu) -> Iterator[int]:
    if isinstance(result, Tensor):
        yield from _copy({"self": result, "src": call["self"]}, result, gpu)


def _round_up(number: int, multiple: int) -> int:
    return math.ceil(number / multiple) * multiple


_Rule = Callable[[dict[str, Any], Any, Gpu], Iterator[int]]

_WORKSPACES: dict[Any, _Rule] = {
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._flash_attention_backward.default: _flash_varlen_backward,
    torch.ops.torch_attn._varlen_attn_backward.default: _torch_varlen_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    aten._cudnn_rnn.default: _recurrent_layers,
    aten._cudnn_rnn_backward.default: _recurrent_layers_backward,
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.index_put.default: _index_put,
    aten.index_put_.default: _index_put,
    aten._index_put_impl_.default: _index_put,
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
}
