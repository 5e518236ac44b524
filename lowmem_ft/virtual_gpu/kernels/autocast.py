"""Autocast on the virtual device as on CUDA: which operators cast their inputs, to what, and which casts are kept.

The installed torch tells which operators have a rule, since its builds without CUDA register CUDA's rules too; so the
lists follow its version (``rms_norm`` came in torch 2.12). The kind of each rule is listed below.

Source: pytorch, aten/src/ATen/autocast_mode.h and autocast_mode.cpp.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.virtual_device import DEVICE_TYPE

_KEY = "AutocastPrivateUse1"
_LIBRARY = torch.library.Library("aten", "IMPL")
_FALLBACK = torch.library.Library("_", "IMPL")

_WITH_DTYPE = {
    "norm.Scalar": "ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "names_ScalarOpt_dim_dtype",
}
"""Operators replaced by their overload with a result type."""


@functools.cache
def register_autocast() -> None:
    """Give ``torch.autocast("vgpu")`` CUDA's rules, once per process; other operators pass unchanged."""
    _FALLBACK.fallback(torch.library.fallthrough_kernel, _KEY)
    for name in _cuda_autocast_operators():
        _LIBRARY.impl(name, _kernel_of(name), _KEY)
    torch.clear_autocast_cache = _clearing_our_cache_too(torch.clear_autocast_cache)


def _cuda_autocast_operators() -> Iterator[str]:
    """Yield the names, such as ``softmax.int``, of operators that have a rule in CUDA's autocast in this torch."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"):
            yield name.removeprefix("aten::")


def _kernel_of(name: str) -> Callable[..., Any]:
    packet, _, overload = name.partition(".")
    overload = _WITH_DTYPE.get(name, overload or "default")
    rule = next((rule for rule, names in _RULES.items() if name in names.split()), _in_float32)
    return _without_autocast(functools.partial(rule, getattr(getattr(torch.ops.aten, packet), overload)))


def _without_autocast(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel whose own calls are not autocast again."""
    keys = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(_KEY))

    @functools.wraps(kernel)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return kernel(*args, **kwargs)

    return guarded


# --- the rules --------------------------------------------------------------------------------------------------------


def _in_lower_precision(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_in(torch.get_autocast_dtype(DEVICE_TYPE), operator, args, kwargs)


def _in_float32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_in(torch.float32, operator, args, kwargs)


def _in_widest_type(operator: Any, *args: Any, **kwargs: Any) -> Any:
    lower = torch.get_autocast_dtype(DEVICE_TYPE)
    tensors = _eligible_tensors((args, tuple(kwargs.values())))
    widest = torch.float32 if any(tensor.dtype == torch.float32 for tensor in tensors) else lower
    return _call_in(widest, operator, args, kwargs)


def _with_float32_result(operator: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_eligible(args[0]):
        return operator(*args, **kwargs)
    names = [argument.name for argument in operator._schema.arguments]
    position = names.index("dtype")
    if position < len(args):
        args = (*args[:position], args[position] or torch.float32, *args[position + 1 :])
    else:
        kwargs["dtype"] = kwargs.get("dtype") or torch.float32
    return operator(*args, **kwargs)


def _with_appended_dtype(operator: Any, *args: Any, **kwargs: Any) -> Any:
    dtype = torch.float32 if _is_eligible(args[0]) else args[0].dtype
    names = [argument.name for argument in operator._schema.arguments if not argument.kwarg_only]
    given = {"p": 2, "keepdim": False} | dict(zip(names, args, strict=False)) | kwargs
    return operator(*(given[name] for name in names), dtype=dtype)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "binary_cross_entropy is not safe under autocast, and CUDA refuses it. Use binary_cross_entropy_with_logits."
    )


def _call_in(dtype: torch.dtype, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return operator(
        *(_cast(argument, dtype) for argument in args),
        **{name: _cast(argument, dtype) for name, argument in kwargs.items()},
    )


def _is_eligible(argument: Any) -> bool:
    return (
        isinstance(argument, Tensor)
        and argument.device.type == DEVICE_TYPE
        and argument.is_floating_point()
        and argument.dtype != torch.float64
    )


def _eligible_tensors(tree: Any) -> Iterator[Tensor]:
    for item in tree:
        if isinstance(item, (tuple, list)):
            yield from _eligible_tensors(item)
        elif _is_eligible(item):
            yield item


_RULES: dict[Callable[..., Any], str] = {
    _in_lower_precision: (
        "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
        "conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul einsum mm "
        "mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell "
        "_thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell "
        "_scaled_dot_product_flash_attention scaled_dot_product_attention cudnn_convolution "
        "cudnn_convolution_transpose _cudnn_rnn"
    ),
    _with_float32_result: (
        "prod prod.dim_int prod.dim_Dimname softmax.int softmax.Dimname log_softmax.int log_softmax.Dimname "
        "cumprod cumprod.dimname cumsum cumsum.dimname linalg_vector_norm linalg_matrix_norm "
        "linalg_matrix_norm.str_ord sum sum.dim_IntList sum.dim_DimnameList"
    ),
    _with_appended_dtype: " ".join(_WITH_DTYPE),
    _in_widest_type: "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add",
    _refuse: "binary_cross_entropy",
}
"""Names of operators by their rule; all others compute in float32."""


# --- casts, and the cache of them -------------------------------------------------------------------------------------

_kept: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
"""Casts of weights by the id of the weight, kept until the outermost autocast block ends."""


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    if isinstance(argument, (tuple, list)):
        return [_cast(item, dtype) for item in argument]
    if not _is_eligible(argument) or argument.dtype == dtype:
        return argument
    if not _is_weight(argument) or dtype != torch.get_autocast_dtype(DEVICE_TYPE):
        return argument.to(dtype)
    if not torch.is_autocast_cache_enabled():
        return argument.to(dtype)
    weight, cast = _kept.get(id(argument), (None, None))
    if weight is None or weight() is not argument:
        cast = argument.to(dtype)
        _kept[id(argument)] = (weakref.ref(argument), cast)
    return cast


def _is_weight(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and not tensor._is_view()


def _clearing_our_cache_too(clear: Callable[[], None]) -> Callable[[], None]:
    """Wrap ``torch.clear_autocast_cache``, which the end of the outermost autocast block calls, to clear ours too."""

    @functools.wraps(clear)
    def clear_autocast_cache() -> None:
        clear()
        _kept.clear()

    return clear_autocast_cache
