"""Types that the tensors of one call may have, and the GPUs with a kernel for them: CUDA's own rules and messages.

Fake tensors check shapes. This module checks what else stops programs that ran on a CPU, or on another GPU: products
of two types, types that a kernel was never compiled for, and kernels that need a later GPU.

Source: pytorch, aten/src/ATen/native/LinearAlgebra.cpp and Convolution.cpp; native/cuda/Blas.cpp, AmpKernels.cu,
NLLLoss2d.cu, layer_norm_kernel.cu, group_norm_kernel.cu, ScaledBlas.cpp; native/transformers/cuda/attention.cu and
flash_attn/flash_api.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.virtual_gpu.calls.type_names import name_of
from lowmem_ft.virtual_gpu.checks.device_mismatches import check_convolution
from lowmem_ft.virtual_gpu.costs.operator_work import ADD_TO_WIDER

Capability = tuple[int, int]
Check = Callable[[Any, Sequence[Any], dict[str, Any], Capability], None]

AMPERE, ADA = (8, 0), (8, 9)
_HALF = (torch.float16, torch.bfloat16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
_C_NAMES = {
    torch.float64: "double",
    torch.float32: "float",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
}
_NO_PRODUCT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *_FLOAT8)


def check_dtypes(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], compute_capability: Capability
) -> None:
    """Check that CUDA has a kernel for the types of a call, on this GPU.

    Args:
        func: the operator.
        args: its arguments.
        kwargs: its keyword arguments.
        compute_capability: that of the GPU.

    Raises:
        RuntimeError: as CUDA does.
        NotImplementedError: as CUDA does.
    """
    check = _CHECKS.get(func._opname)
    if check is not None:
        check(func, args, kwargs, compute_capability)


def _not_implemented(kernel: str, dtype: torch.dtype) -> NotImplementedError:
    return NotImplementedError(f"\"{kernel}\" not implemented for '{name_of(dtype)}'")


def _check_matrices(kernel: str, at: int) -> Check:
    """Return a check for products of the tensors at ``at`` and ``at + 1``; the one before, if any, is added."""

    def check(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
        first, second = args[at : at + 2]
        if at and args[0].dtype != second.dtype and func not in ADD_TO_WIDER:
            raise RuntimeError(
                f"self and mat2 must have the same dtype, but got {name_of(args[0].dtype)} and {name_of(second.dtype)}"
            )
        if first.dtype != second.dtype:
            one, other = (_C_NAMES.get(dtype, name_of(dtype)) for dtype in (first.dtype, second.dtype))
            raise RuntimeError(f"expected mat1 and mat2 to have the same dtype, but got: {one} != {other}")
        if first.dtype in _NO_PRODUCT:
            raise _not_implemented(kernel, first.dtype)

    return check


def _check_batches(at: int) -> Check:
    def check(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
        first, second = args[at : at + 2]
        if first.dtype != second.dtype:
            raise RuntimeError(
                f"expected scalar type {name_of(first.dtype)} but found {name_of(second.dtype)}"
            )
        if first.dtype in _NO_PRODUCT:
            raise _not_implemented("baddbmm_cuda", first.dtype)

    return check


def _check_convolution(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability
) -> None:
    check_convolution(args, lambda tensor: tensor.dtype)


def _check_flash(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
    query, key, value = args[:3]
    if capability < AMPERE:
        raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
    if query.dtype not in _HALF:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    for name, other in (("key", key), ("value", value)):
        if other.dtype != query.dtype:
            raise RuntimeError(f"query and {name} must have the same dtype")


def _check_efficient(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
    query, key, value = args[:3]
    is_compiled = query.dtype in (torch.float32, torch.float16) or (
        query.dtype == torch.bfloat16 and capability >= AMPERE
    )
    if not is_compiled or not (query.dtype == key.dtype == value.dtype):
        raise RuntimeError("cutlassF: no kernel found to launch!")


def _check_scaled_mm(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
    if capability < ADA:
        raise RuntimeError(
            "torch._scaled_mm is only supported on CUDA devices with compute capability >= 9.0 or 8.9, or ROCm MI300+"
        )


def _check_unscaling(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
    for gradient in args[0]:
        if gradient.dtype not in (torch.float32, torch.float64, torch.float16):
            raise _not_implemented(f"{func._opname}cuda", gradient.dtype)


def _check_norm(at: int) -> Check:
    """Return a check for a norm whose weight and bias are at ``at`` and ``at + 1``."""

    def check(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
        for parameter in args[at : at + 2]:
            if isinstance(parameter, Tensor) and parameter.dtype != args[0].dtype:
                raise RuntimeError(
                    f"expected scalar type {name_of(args[0].dtype)} but found {name_of(parameter.dtype)}"
                )

    return check


def _check_targets(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
    if args[1].dtype not in (torch.int64, torch.uint8):
        raise _not_implemented("nll_loss_forward_reduce_cuda_kernel_2d_index", args[1].dtype)


def _check_fused(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
    dtype = args[0][0].dtype if args[0] else torch.float32
    if not dtype.is_floating_point or dtype in _FLOAT8:
        raise _not_implemented(f"{func._opname.strip('_')}_kernel_cuda", dtype)


def _check_arithmetic(func: Any, args: Sequence[Any], kwargs: dict[str, Any], capability: Capability) -> None:
    """Refuse arithmetic on float8: CUDA only stores, copies and casts such numbers."""
    for argument in args:
        if isinstance(argument, Tensor) and argument.dtype in _FLOAT8:
            raise _not_implemented(f"{func._opname.strip('_')}_cuda", argument.dtype)


_ARITHMETIC = (
    "add sub mul div add_ sub_ mul_ div_ addcmul addcdiv addcmul_ addcdiv_ lerp lerp_ exp log sqrt rsqrt pow neg "
    "sigmoid tanh silu gelu relu sum mean var cumsum _softmax _log_softmax linalg_vector_norm amax amin"
)
_CHECKS: dict[str, Check] = {
    "mm": _check_matrices("addmm_cuda", 0),
    "addmm": _check_matrices("addmm_cuda", 1),
    "addmm_": _check_matrices("addmm_cuda", 1),
    "mv": _check_matrices("addmv_impl_cuda", 0),
    "addmv": _check_matrices("addmv_impl_cuda", 1),
    "dot": _check_batches(0),
    "bmm": _check_batches(0),
    "baddbmm": _check_batches(1),
    "baddbmm_": _check_batches(1),
    "addbmm": _check_batches(1),
    "convolution": _check_convolution,
    "_scaled_dot_product_flash_attention": _check_flash,
    "_flash_attention_forward": _check_flash,
    "_scaled_dot_product_efficient_attention": _check_efficient,
    "_scaled_mm": _check_scaled_mm,
    "_amp_foreach_non_finite_check_and_unscale_": _check_unscaling,
    "native_layer_norm": _check_norm(2),
    "native_group_norm": _check_norm(1),
    "nll_loss_forward": _check_targets,
    **dict.fromkeys(("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"), _check_fused),
    **dict.fromkeys(_ARITHMETIC.split(), _check_arithmetic),
}
