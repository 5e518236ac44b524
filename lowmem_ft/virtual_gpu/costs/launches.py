"""Number of kernels that an operator of torch launches on CUDA, where it is not one.

Each operator has one rule, taken from the code that launches its kernels; memsets are issued as kernels are, and count
as such. With lists, each tensor takes a share of a launch, so that the launches of more layers add up; the caller
rounds up. An operator without a rule here counts as one. Left out is what the hardware decides (products whose inner
dimension cuBLAS splits, the memset before a reduction over several blocks) and what training of language models hardly
calls (sorts, ``topk``).

Sources: pytorch, under ``aten/src/ATen/native``, as it was around 2.13; the kernels of CUB's sort
(``dispatch_radix_sort.cuh``) and the last ones of an embedding's gradient are counted from memory. No count has been
checked against a profile of a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

Rule = Callable[[dict[str, Any], Any], float]
"""Function from a call's arguments by name and its result to its number of launches."""

_CHUNK_ELEMENTS = 65536
_MOST_CHUNKS = 2240
_MOST_TENSORS = (770, 448, 336, 252, 210)
_MOST_TENSORS_WITH_SCALARS = (672, 448, 336, 252, 210)
"""Most tensors in a launch, by the number of lists; above, the elements of a chunk and the most chunks.

Source: ``cuda/MultiTensorApply.cuh``, as compiled with CUDA 13, which torch's wheels use; before that, a launch took a
seventh of each.
"""

_MOST_JOINED = 128
_MOST_JOINED_WITH_STRIDES = 64
_MOST_JOINED_DIMS = 4
"""Limits of ``cat_out_cuda`` in ``cuda/Shape.cu``."""

_FEW_TOKENS = 3072
"""Tokens up to which a gradient is summed without sorting, in ``cuda/Embedding.cu``."""

_SORTED_BY_ONE_BLOCK = 256 * 9


def launches_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    """Return the number of kernels that one call of an operator launches, before rounding up.

    Args:
        func: the operator, as a dispatch mode sees it.
        args: its arguments.
        kwargs: its keyword arguments.
        result: what it returned.
    """
    rule = _rule_of(func)
    if rule is None:
        return 1
    names = (argument.name for argument in func._schema.arguments)
    return rule({**dict(zip(names, args, strict=False)), **kwargs}, result)


@functools.cache
def _rule_of(func: Any) -> Rule | None:
    name: str = func._schema.name
    if name.startswith("aten::_foreach_"):
        return functools.partial(_foreach, func) if name != "aten::_foreach_norm" else _foreach_norm
    if name.startswith(("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")):
        return functools.partial(_fused_optimizer, func)
    return _RULES.get(name)


def _always(launches: int) -> Rule:
    return lambda call, result: launches


# --- lists of tensors ------------------------------------------------------------------------------------------------


def _foreach(func: Any, call: dict[str, Any], result: Any) -> float:
    """Count launches by the tensors and the chunks that one takes; lists of several types are done one by one."""
    lists = _lists_in(func, call)
    first = lists[0]
    if not _is_fast(lists):
        return sum(tensor.numel() > 0 for tensor in first)
    depth = len(lists) + bool(result)
    has_scalars = isinstance(call.get("scalars"), (list, tuple))
    return _multi_tensor_launches(first, depth, _MOST_TENSORS_WITH_SCALARS if has_scalars else _MOST_TENSORS)


def _foreach_norm(call: dict[str, Any], result: Any) -> float:
    """Count ``cuda/ForeachReduceOp.cu``: two buffers of zeros, the chunks' norms, and those of the tensors."""
    tensors = call["self"]
    if not _is_fast([tensors]):
        return len(tensors)
    return 3 + _multi_tensor_launches(tensors, 1)


def _fused_optimizer(func: Any, call: dict[str, Any], result: Any) -> float:
    """Count all lists except the steps, which one launch increments first, for as many scalars."""
    lists = [
        each
        for argument in func._schema.arguments
        if argument.name != "state_steps" and _is_list_of_tensors(each := call.get(argument.name))
    ]
    return _multi_tensor_launches(call["self"], len(lists))


def _multi_tensor_launches(
    tensors: Iterable[Tensor], depth: int, most_tensors: Sequence[int] = _MOST_TENSORS
) -> float:
    """Count launches as ``multi_tensor_apply`` fills them: one ends when it is full of chunks, or of tensors.

    A list of large tensors and of many small ones counts as the sum of both, too high by a factor of two at most.
    """
    least = 1 / most_tensors[depth - 1]
    chunks = (-(-tensor.numel() // _CHUNK_ELEMENTS) for tensor in tensors if tensor.numel())
    return sum(max(least, number / _MOST_CHUNKS) for number in chunks)


def _lists_in(func: Any, call: dict[str, Any]) -> list[Sequence[Tensor]]:
    values = (call.get(argument.name) for argument in func._schema.arguments)
    return [value for value in values if _is_list_of_tensors(value)]


def _is_list_of_tensors(value: Any) -> TypeGuard[Sequence[Tensor]]:
    return isinstance(value, (list, tuple)) and bool(value) and isinstance(value[0], Tensor)


def _is_fast(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Follow ``can_use_fast_route`` of ``ForeachUtils.h``: one type, and equal shapes and strides at each position."""
    kind = (lists[0][0].dtype, lists[0][0].device)
    return all(
        (each.dtype, each.device) == kind and each.shape == one.shape and each.stride() == one.stride()
        for others in lists
        for one, each in zip(lists[0], others, strict=True)
    )


def _joined(call: dict[str, Any], result: Any) -> float:
    """Count one launch for all tensors that fit into a kernel's arguments; else a copy each."""
    tensors = [tensor for tensor in call["tensors"] if tensor.numel()]
    if len(tensors) <= 1 or any(tensor.dtype != result.dtype for tensor in tensors):
        return len(tensors)
    if result.dim() > _MOST_JOINED_DIMS:
        return len(tensors)
    is_contiguous = all(tensor.is_contiguous() for tensor in tensors)
    return len(tensors) / (_MOST_JOINED if is_contiguous else _MOST_JOINED_WITH_STRIDES)


# --- gradients -------------------------------------------------------------------------------------------------------


def _embedding_backward(call: dict[str, Any], result: Any) -> int:
    """Count ``cuda/Embedding.cu`` and ``EmbeddingBackwardKernel.cu``.

    With many tokens: numbers, a sort by all bits, segments (2), zeros, the segments' parts, the parts' offsets (2),
    their number, their starts, sums, and the sums of these.
    """
    indices = call["indices"]
    by_frequency = 4 if call.get("scale_grad_by_freq") else 0
    if indices.numel() <= _FEW_TOKENS and not by_frequency:
        return 2
    return 11 + _sort_launches(indices.numel(), 8 * indices.element_size()) + by_frequency


def _index_put(call: dict[str, Any], result: Any) -> int:
    """Count ``cuda/Indexing.cu``: ``index_put_with_sort_kernel`` if it accumulates; else one kernel."""
    target = call["self"]
    copies = 0 if result is target else 1
    if not call.get("accumulate"):
        return copies + 1
    indices = [index for index in call["indices"] if index is not None]
    num_indexed = math.prod(
        size for size, index in zip(target.shape, call["indices"], strict=False) if index is not None
    )
    checks = 0 if call.get("unsafe") else 5  # minimum and maximum, two comparisons, two assertions
    num_indices = max(index.numel() for index in indices)
    # For each index, wrapping and multiplying by the stride; their sums; whole rows; numbers; the sort; the sums.
    linear = len(indices) * (checks + 2) + len(indices) - 1
    return copies + linear + 3 + _sort_launches(num_indices, max(1, num_indexed).bit_length())


def _sort_launches(num_elements: int, bits: int) -> int:
    """Count ``DeviceRadixSort`` of 8-byte keys and values: one block, or a histogram, its sums and a pass per 8 bits.

    Two memsets come before the histogram, and one before each pass.
    """
    return 1 if num_elements <= _SORTED_BY_ONE_BLOCK else 4 + 2 * -(-bits // 8)


def _flash_backward(head_dim: int, call: dict[str, Any], result: Any) -> int:
    """Count products of gradients and results, all gradients, queries' from float32, sums of heads that share keys.

    Source: ``transformers/cuda/flash_attn``: ``flash_bwd_launch_template.h``, ``flash_api.cpp``.
    """
    shares_keys = call["query"].shape[head_dim] != call["key"].shape[head_dim]
    clears_sums = torch.are_deterministic_algorithms_enabled()
    return 3 + 2 * shares_keys + clears_sums


def _efficient_backward(call: dict[str, Any], result: Any) -> int:
    """Count ``transformers/cuda/attention_backward.cu``: one kernel in 16 bits; else product, sum, copy first."""
    return 1 if call["query"].dtype in (torch.float16, torch.bfloat16) else 4


# --- products and scans ----------------------------------------------------------------------------------------------


def _addmm(call: dict[str, Any], result: Any) -> int:
    """Count ``cuda/Blas.cpp``: the product itself adds a bias; anything else is first copied to another result."""
    bias = call["self"]
    if call.get("out") is bias:
        return 1
    return 1 if bias.dim() == 1 and bias.is_contiguous() and call.get("beta", 1) == 1 else 2


def _scan(call: dict[str, Any], result: Any) -> int:
    """Count ``cuda/ScanUtils.cuh``: CUB's two kernels for a single row, else one for all."""
    return 2 if call["self"].numel() == call["self"].shape[call["dim"]] else 1


_FILL_THEN_WRITE = (
    "nll_loss_backward slice_backward select_backward constant_pad_nd masked_fill scatter scatter_add index_add "
    "index_fill index_copy slice_scatter select_scatter"
)
"""Operators that fill with zeros, or copy their first argument, then write values into it."""

_RULES: dict[str, Rule] = {
    "aten::cat": _joined,
    "aten::stack": _joined,
    "aten::addmm": _addmm,
    "aten::baddbmm": _always(2),
    "aten::_grouped_mm": _always(2),  # cuda/GroupMM.cu: addresses first
    "aten::embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"), _index_put),
    "aten::native_layer_norm_backward": _always(2),  # cuda/layer_norm_kernel.cu: of the input, of the weights
    "aten::_fused_rms_norm_backward": _always(2),
    **dict.fromkeys(map("aten::{}".format, _FILL_THEN_WRITE.split()), _always(2)),
    "aten::_scaled_dot_product_flash_attention_backward": functools.partial(_flash_backward, -3),
    "aten::_flash_attention_backward": functools.partial(_flash_backward, -2),
    "torch_attn::_varlen_attn_backward": functools.partial(_flash_backward, -2),
    "aten::_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "aten::_efficient_attention_backward": _efficient_backward,
    **dict.fromkeys(("aten::cumsum", "aten::cumprod", "aten::logcumsumexp"), _scan),
}
