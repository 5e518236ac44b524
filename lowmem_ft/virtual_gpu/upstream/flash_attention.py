"""Flash attention on the virtual GPU: the package flash-attn without an installation, and torch's own for documents.

Both have the same kernels, with the same outputs, saved tensors and buffers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as upstream

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.patches import existing, replace, wrap
from lowmem_ft.virtual_gpu.calls.active import active_gpu

_NAME = "flash_attention_2"
_FORWARD = "_flash_attention_forward"
"""Function that calls the kernels. Falcon, GPT-Neo and GPT-J import it only if the package is installed."""

_AMPERE = (8, 0)


def flash_attention_as_on_cuda(undo: contextlib.ExitStack) -> None:
    """Let models use flash_attention_2 until a stack is undone, and let torch's kernel check its inputs."""
    padding = existing(upstream, "_pad_input"), existing(upstream, "_unpad_input")
    wrap(undo, varlen, "varlen_attn", _checked_varlen_attn)
    wrap(undo, PreTrainedModel, "_flash_attn_can_dispatch", functools.partial(_can_dispatch, undo))
    wrap(undo, upstream, "_lazy_imports", functools.partial(_imports, padding))
    undo.callback(setattr, upstream, "_loaded_implementation", None)  # ours must not be used elsewhere
    replace(undo, upstream, "_loaded_implementation", None)  # nor one loaded elsewhere be used here


def _checked_varlen_attn(
    varlen_attn: Callable[..., Any], query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    gpu = active_gpu()
    _check((query, key, value), gpu.spec.compute_capability, "varlen_attn")
    gpu.say("attention: flash kernel over documents end to end")
    return varlen_attn(query, key, value, *args, **kwargs)


def _can_dispatch(
    undo: contextlib.ExitStack,
    can_dispatch: Callable[..., bool],
    model: PreTrainedModel,
    flash_attn_version: int,
    *args: Any,
    **kwargs: Any,
) -> bool:
    """Allow version 2, and give modules of models without the package what they would have imported from it."""
    if flash_attn_version != 2:
        return can_dispatch(model, flash_attn_version, *args, **kwargs)
    for module in {sys.modules.get(cls.__module__) for cls in type(model).__mro__}:
        if hasattr(module, "is_flash_attn_available") and not hasattr(module, _FORWARD):
            setattr(module, _FORWARD, existing(upstream, _FORWARD))
            undo.callback(delattr, module, _FORWARD)
    return True


def _imports(
    padding: tuple[Any, Any],
    imports: Callable[..., Any],
    implementation: str | None,
    *args: Any,
    **kwargs: Any,
) -> tuple[Any, ...]:
    if implementation != _NAME:
        return imports(implementation, *args, **kwargs)
    return _flash_attn_func, _flash_attn_varlen_func, None, *padding


def _flash_attn_func(q_BTHD: Tensor, k_BSHD: Tensor, v_BSHD: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute ``flash_attn.flash_attn_func`` on fake tensors: B x T x H x D."""
    longest = q_BTHD.size(1), k_BSHD.size(1)
    return _flash_attn_varlen_func(q_BTHD, k_BSHD, v_BSHD, None, None, *longest, *args, **kwargs)


def _flash_attn_varlen_func(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Compute ``flash_attn.flash_attn_varlen_func`` on fake tensors: documents end to end, T x H x D."""
    gpu, operands = active_gpu(), (q_THD, k_SHD, v_SHD)
    _check(operands, gpu.spec.compute_capability, _NAME)
    gpu.say("attention: flash-attn 2, which has to be installed where the run is")
    size = q_THD.size(-1)
    left, right = (None if extent < 0 else extent for extent in window_size)
    output = torch.ops.aten._flash_attention_forward(
        *(F.pad(operand, (0, -size % 8)) if size % 8 else operand for operand in operands),
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        dropout_p,
        causal,
        False,
        scale=size**-0.5 if softmax_scale is None else softmax_scale,
        window_size_left=left,
        window_size_right=right,
    )[0]
    return output[..., :size] if size % 8 else output


def _check(operands: tuple[Tensor, Tensor, Tensor], capability: tuple[int, int], name: str) -> None:
    for operand in operands:
        if operand.device.type == "cpu":
            raise NotImplementedError(
                f"{name} has no kernel for the CPU, and was given a tensor that is there"
            )
    if capability < _AMPERE:
        got = f"compute capability {capability[0]}.{capability[1]}"
        needs = "compute capability 8.0 or later (Ampere)"
    elif operands[0].dtype not in (torch.float16, torch.bfloat16):
        got, needs = str(operands[0].dtype).removeprefix("torch."), "bfloat16 or float16 computation"
    else:
        return
    raise UserError(f"attn_implementation={name} needs {needs}, got {got}. Set attn_implementation=sdpa.")
