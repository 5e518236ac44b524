"""Flash attention on the virtual GPU: the package flash-attn without an installation, and torch's own for documents.

Both have the same kernels, with the same outputs, saved tensors and buffers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as upstream

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.upstream.patches import existing, replace
from lowmem_ft.virtual_gpu.active import active_gpu

_NAME = "flash_attention_2"
_FORWARD = "_flash_attention_forward"
"""Function that calls the kernels. Falcon, GPT-Neo and GPT-J import it only if the package is installed."""

_AMPERE = (8, 0)
_EVERYWHERE = (-1, -1)


@contextlib.contextmanager
def flash_attention_as_on_cuda() -> Iterator[None]:
    """Let models use flash_attention_2 in a block, and let torch's kernel check its inputs."""
    can_dispatch = existing(PreTrainedModel, "_flash_attn_can_dispatch")
    lazy_imports = existing(upstream, "_lazy_imports")
    forward = existing(upstream, _FORWARD)
    padding = existing(upstream, "_pad_input"), existing(upstream, "_unpad_input")
    varlen_attn = existing(varlen, "varlen_attn")

    def flash_attn_can_dispatch(
        self: PreTrainedModel, flash_attn_version: int, is_init_check: bool = False
    ) -> bool:
        if flash_attn_version != 2:
            return can_dispatch(self, flash_attn_version, is_init_check)
        for module in {sys.modules.get(cls.__module__) for cls in type(self).__mro__}:
            if hasattr(module, "is_flash_attn_available") and not hasattr(module, _FORWARD):
                setattr(module, _FORWARD, forward)
                undo.callback(delattr, module, _FORWARD)
        return True

    def virtual_imports(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        if implementation != _NAME:
            return lazy_imports(implementation, *args, **kwargs)
        return flash_attn_func, flash_attn_varlen_func, None, *padding

    @functools.wraps(varlen_attn)
    def checked_varlen_attn(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        gpu = active_gpu()
        _check((query, key, value), gpu.spec.compute_capability, "varlen_attn")
        gpu.say("attention: flash kernel over documents end to end")
        return varlen_attn(query, key, value, *args, **kwargs)

    with contextlib.ExitStack() as undo:
        replace(undo, varlen, "varlen_attn", checked_varlen_attn)
        replace(undo, PreTrainedModel, "_flash_attn_can_dispatch", flash_attn_can_dispatch)
        replace(undo, upstream, "_lazy_imports", virtual_imports)
        undo.callback(setattr, upstream, "_loaded_implementation", None)  # ours must not be used elsewhere
        replace(undo, upstream, "_loaded_implementation", None)  # nor one loaded elsewhere be used here
        yield


def flash_attn_func(
    q_BTHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _EVERYWHERE,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Compute ``flash_attn.flash_attn_func`` on fake tensors: B x T x H x D."""
    return _run(
        (q_BTHD, k_BSHD, v_BSHD), None, None, None, None, dropout_p, softmax_scale, causal, window_size
    )


def flash_attn_varlen_func(
    q_THD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _EVERYWHERE,
    softcap: float = 0.0,
    deterministic: bool = False,
) -> Tensor:
    """Compute ``flash_attn.flash_attn_varlen_func`` on fake tensors: documents end to end, T x H x D."""
    longest = int(max_seqlen_q), int(max_seqlen_k)
    return _run(
        (q_THD, k_SHD, v_SHD),
        cu_seqlens_q,
        cu_seqlens_k,
        *longest,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
    )


def _run(
    operands: tuple[Tensor, Tensor, Tensor],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    gpu = active_gpu()
    _check(operands, gpu.spec.compute_capability, _NAME)
    gpu.say("attention: flash-attn 2, which has to be installed where the run is")
    size = operands[0].size(-1)
    query, key, value = (F.pad(operand, (0, -size % 8)) if size % 8 else operand for operand in operands)
    left, right = (None if extent < 0 else extent for extent in window_size)
    output = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        query.size(1) if max_seqlen_q is None else max_seqlen_q,
        key.size(1) if max_seqlen_k is None else max_seqlen_k,
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
