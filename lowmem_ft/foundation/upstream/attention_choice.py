"""The kernel that ``scaled_dot_product_attention`` runs on a CUDA device.

Torch tries its kernels in an order and takes the first whose conditions are met. The choice decides the memory: flash
and cuDNN keep an output and one float32 number a row, memory-efficient attention also keeps a mask, and the
composite of plain operators keeps scores of tokens x tokens for every head.

Source: pytorch, aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.h.
Dimensions: B batch, H heads, T query tokens, S key tokens, D head size.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.torch_version import TORCH_VERSION

Backend = Literal["flash", "efficient", "cudnn", "math"]

KERNEL_NAMES: dict[Backend, str] = {
    "flash": "flash kernel",
    "efficient": "memory-efficient kernel",
    "cudnn": "cuDNN kernel",
    "math": "unfused operators, which keep scores of tokens x tokens for every head",
}
_HALF = (torch.float16, torch.bfloat16)
_NEWEST_KERNELS = (12, 1)
"""The last compute capability that the kernels of torch 2.11 to 2.14 are built for."""


@dataclass(frozen=True, kw_only=True)
class SdpaChoice:
    """The kernel that torch chooses, and why it rejected those with higher priority; empty if it rejected none."""

    backend: Backend
    reason: str


@dataclass(frozen=True)
class SdpaCall:
    """A call of ``scaled_dot_product_attention`` on a GPU. To choose its kernel, no values are read.

    Args:
        query: B x H x T x D, on any device and of any type.
        key: B x H x S x D; it may have fewer heads with ``enable_gqa``.
        value: likewise.
        attn_mask: boolean or additive, broadcastable to B x H x T x S.
        dropout_p: share of attention weights dropped.
        is_causal: whether the kernel masks the future itself.
        scale: factor of the scores; None is one over the square root of D.
        enable_gqa: whether groups of query heads share a key head.
        capability: the GPU's compute capability, such as (8, 0).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = field(default=None, kw_only=True)
    enable_gqa: bool = field(default=False, kw_only=True)
    capability: tuple[int, int] = field(kw_only=True)

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def major(self) -> int:
        """The GPU's generation: 8 is Ampere."""
        return self.capability[0]

    @property
    def head_size(self) -> int:
        """Size of a query's head, D."""
        return self.query.size(-1)


def choose_sdpa(call: SdpaCall) -> SdpaChoice:
    """Return the kernel that torch takes for a call, with torch's usual packages.

    The switches of ``torch.backends.cuda`` and ``torch.nn.attention.sdpa_kernel`` apply, as on a device.
    Limits: inputs of three dimensions, to which torch 2.14 adds a batch dimension of one, count as unfused.

    Args:
        call: its tensors' shapes, strides, types and ``requires_grad`` are read.

    Returns:
        The kernel and the reason.

    Raises:
        UserError: if no kernel that is switched on can run.
    """
    passed_over: list[str] = []
    for backend in _priority(call.capability):
        obstacle = _OBSTACLES[backend](call)
        if obstacle is None:
            return SdpaChoice(backend=backend, reason="; ".join(passed_over))
        passed_over.append(f"{KERNEL_NAMES[backend].split()[0]} needs {obstacle}")
    raise UserError(
        f"scaled_dot_product_attention needs a kernel that is switched on and can run: {'; '.join(passed_over)}. "
        "Switch on torch.backends.cuda.enable_math_sdp(True), or set model.attn_implementation=eager."
    )


def _priority(capability: tuple[int, int]) -> list[Backend]:
    """Return the order in which torch tries its kernels: the user's, or the default of the device."""
    order: list[Backend] = [
        _BACKENDS[number] for number in torch._C._get_sdp_priority_order() if number in _BACKENDS
    ]
    is_default = order == ["flash", "efficient", "math", "cudnn"]
    if is_default and capability[0] in (9, 10) and os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1":
        return ["cudnn", "flash", "efficient", "math"]
    return order


_SDPA: Any = SDPBackend
_BACKENDS: dict[int, Backend] = {
    int(_SDPA.FLASH_ATTENTION): "flash",
    int(_SDPA.EFFICIENT_ATTENTION): "efficient",
    int(_SDPA.CUDNN_ATTENTION): "cudnn",
    int(_SDPA.MATH): "math",
}


def _flash_obstacle(call: SdpaCall) -> str | None:
    """Return what the flash kernel needs and lacks; None if it can run."""
    if not torch.backends.cuda.flash_sdp_enabled():
        return "torch.backends.cuda.enable_flash_sdp(True)"
    if not (8, 0) <= call.capability <= _NEWEST_KERNELS:
        return f"compute capability 8.0 to 12.1, got {_dotted(call.capability)}"
    return (
        _shape_obstacle(call)
        or ("no attention mask" if call.attn_mask is not None else None)
        or _flash_head_size_obstacle(call)
        or _non_square_causal_obstacle(call)
        or _dtype_obstacle(call, _HALF)
        or _heads_obstacle(call, supports_gqa=True)
        or _layout_obstacle(call, singleton_is_fine=True)
    )


def _efficient_obstacle(call: SdpaCall) -> str | None:
    """Return what the memory-efficient kernel needs and lacks; None if it can run."""
    if not torch.backends.cuda.mem_efficient_sdp_enabled():
        return "torch.backends.cuda.enable_mem_efficient_sdp(True)"
    if not (5, 0) <= call.capability <= _NEWEST_KERNELS:
        return f"compute capability 5.0 to 12.1, got {_dotted(call.capability)}"
    dtypes = (torch.float16, torch.float32, *((torch.bfloat16,) if call.major >= 8 else ()))
    return (
        _shape_obstacle(call)
        or _gemm_alignment_obstacle(call)
        or _layout_obstacle(call, singleton_is_fine=False)
        or _heads_obstacle(call, supports_gqa=TORCH_VERSION >= (2, 14))
        or _dtype_obstacle(call, dtypes)
    )


def _cudnn_obstacle(call: SdpaCall) -> str | None:
    """Return what cuDNN's kernel needs and lacks; torch's packages include cuDNN 9.19 or later."""
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return "torch.backends.cuda.enable_cudnn_sdp(True)"
    if not (8, 0) <= call.capability <= _NEWEST_KERNELS:
        return f"compute capability 8.0 to 12.1, got {_dotted(call.capability)}"
    is_deterministic = (
        torch.are_deterministic_algorithms_enabled()
        and not torch.is_deterministic_algorithms_warn_only_enabled()
    )
    if is_deterministic:
        return "torch.use_deterministic_algorithms(False)"
    return (
        _shape_obstacle(call)
        or _dtype_obstacle(call, _HALF)
        or _cudnn_mask_obstacle(call)
        or _cudnn_dropout_obstacle(call)
        or _layout_obstacle(call, singleton_is_fine=True)
        or _heads_obstacle(call, supports_gqa=True, same_kv_heads=False)
        or _cudnn_size_obstacle(call)
    )


def _math_obstacle(call: SdpaCall) -> str | None:
    return None if torch.backends.cuda.math_sdp_enabled() else "torch.backends.cuda.enable_math_sdp(True)"


_OBSTACLES: dict[Backend, Callable[[SdpaCall], str | None]] = {
    "flash": _flash_obstacle,
    "efficient": _efficient_obstacle,
    "cudnn": _cudnn_obstacle,
    "math": _math_obstacle,
}


def _shape_obstacle(call: SdpaCall) -> str | None:
    if any(operand.dim() != 4 for operand in call.operands):
        return f"inputs of 4 dimensions, got {call.query.dim()}"
    if 0 in (call.query.size(-2), call.key.size(-2)):
        return "at least one token"
    return None


def _dtype_obstacle(call: SdpaCall, dtypes: tuple[torch.dtype, ...]) -> str | None:
    if all(operand.dtype == call.query.dtype for operand in call.operands) and call.query.dtype in dtypes:
        return None
    return f"{' or '.join(map(_name, dtypes))}, got {', '.join(dict.fromkeys(map(_name, _dtypes(call))))}"


def _flash_head_size_obstacle(call: SdpaCall) -> str | None:
    sizes = {operand.size(-1) for operand in call.operands}
    if len(sizes) > 1 or max(sizes) > 256:
        return f"one head size of at most 256, got {', '.join(map(str, sorted(sizes)))}"
    has_little_shared_memory = (8, 6) <= call.capability <= (8, 9) or (12, 0) <= call.capability <= (12, 1)
    is_fine = call.head_size <= 192 or (call.dropout_p == 0 and call.head_size > 224)
    if has_little_shared_memory and not is_fine and trains(*call.operands):
        return (
            f"a head size of at most 192 to train on compute capability {_dotted(call.capability)} "
            f"(or more than 224 without dropout), got {call.head_size}"
        )
    return None


def _non_square_causal_obstacle(call: SdpaCall) -> str | None:
    if call.is_causal and call.query.size(-2) != call.key.size(-2):
        return f"as many queries as keys with is_causal, got {call.query.size(-2)} and {call.key.size(-2)}"
    return None


def _heads_obstacle(call: SdpaCall, *, supports_gqa: bool, same_kv_heads: bool = True) -> str | None:
    batches = [operand.size(0) for operand in call.operands]
    if len(set(batches)) > 1:
        return f"one batch size, got {batches}"
    query, key, value = heads = [operand.size(-3) for operand in call.operands]
    if call.enable_gqa and supports_gqa:
        if (same_kv_heads and key != value) or query % key or query % value:
            return f"key heads that divide the query heads, got {heads}"
        return None
    is_mqa = TORCH_VERSION >= (2, 14) and key == value == 1 and query > 0
    if len(set(heads)) > 1 and not (is_mqa and supports_gqa):
        return f"as many key heads as query heads, got {heads}"
    return None


def _layout_obstacle(call: SdpaCall, *, singleton_is_fine: bool) -> str | None:
    operands_are_fine = all(operand.stride(-1) == 1 for operand in call.operands)
    operands_are_fine = operands_are_fine or (singleton_is_fine and call.head_size == 1)
    if operands_are_fine and (call.attn_mask is None or call.attn_mask.stride(-1) == 1):
        return None
    return "inputs and mask whose last dimension is contiguous"


def _gemm_alignment_obstacle(call: SdpaCall) -> str | None:
    is_half = call.query.dtype in _HALF
    elements = 4 if call.major >= 8 else 1
    if call.major >= 8 or (call.major >= 7 and is_half):  # tensor cores load 16 bytes at once
        elements = max(elements, 128 // (16 if is_half else 32))
    sizes = [operand.size(-1) for operand in call.operands]
    if sizes[0] != sizes[1] or any(size % elements for size in sizes):
        return f"a head size that is a multiple of {elements}, got {call.head_size}"
    alignment = elements * call.query.element_size()
    if TORCH_VERSION >= (2, 14) and call.major >= 8 and not _starts_aligned(call, alignment):
        return f"inputs that start at a multiple of {alignment} bytes"
    return None


def _starts_aligned(call: SdpaCall, alignment: int) -> bool:
    return all(
        operand.storage_offset() * operand.element_size() % alignment == 0 for operand in call.operands
    )


def _cudnn_mask_obstacle(call: SdpaCall) -> str | None:
    mask = call.attn_mask
    if mask is None:
        return None
    if mask.requires_grad:
        return "a mask that is not trained"
    full = (*call.query.shape[:-1], call.key.size(-2))
    is_broadcastable = mask.dim() in (2, 4) and all(
        size in (1, whole) for size, whole in zip(mask.shape, full[-mask.dim() :], strict=True)
    )
    return None if is_broadcastable else f"a mask of 2 or 4 dimensions, got {tuple(mask.shape)}"


def _cudnn_dropout_obstacle(call: SdpaCall) -> str | None:
    if call.dropout_p * 16 % 1:
        return f"dropout in steps of 1/16, got {call.dropout_p}"
    if call.dropout_p and call.query.size(-2) == 1:
        return "more than one query with dropout"
    return None


def _cudnn_size_obstacle(call: SdpaCall) -> str | None:
    if max(call.query.shape[:2]) > 65535:
        return "batch and heads of at most 65535"
    if call.key.size(-2) == 1:
        return "more than one key"
    d_qk, d_v = call.head_size, call.value.size(-1)
    is_datacenter = call.capability == (9, 0) or call.major == 10
    goes_to_256 = is_datacenter and TORCH_VERSION >= (2, 14)
    limit = 256 if goes_to_256 else 192 if is_datacenter and (d_qk, d_v) == (192, 128) else 128
    if max(d_qk, d_v) > limit or d_qk % 8 or d_v % 8:
        return f"a head size that is a multiple of 8 and at most {limit}, got {d_qk}"
    has_backward = max(d_qk, d_v) <= 128 or (d_qk, d_v) in ((192, 128), (256, 256))
    if goes_to_256 and not has_backward and trains(*call.operands):
        return f"a head size of at most 128, or 256, to train, got {d_qk}"
    return None


def trains(*operands: Tensor) -> bool:
    """Return whether autograd records a call with these inputs."""
    return torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)


def _dtypes(call: SdpaCall) -> list[torch.dtype]:
    return [operand.dtype for operand in call.operands]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
