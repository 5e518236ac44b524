"""CUDA's fused attention kernels in plain operators on the CPU, so that torch's own ring runs over gloo.

torch's ring handles the flash and memory-efficient kernels of a GPU, and no kernel of the CPU. Here
``scaled_dot_product_attention`` takes the kernel that a GPU would take, by the same conditions; inside the ring, what
neither of the two takes is refused. What the ring does around them (exchange, merging, load balance) is torch's.

Axes: B rows, H query heads, K key heads, T query tokens, S key tokens, D head size.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.foundation.upstream.attention_choice import SdpaCall, choose_sdpa

CAPABILITY = (8, 0)
"""The compute capability of the GPU that is stood in for."""

BLOCK = 32
"""The memory-efficient kernel keeps a row's logarithms of sums in blocks of so many."""


@contextlib.contextmanager
def fused_kernels_on_cpu() -> Iterator[Counter[str]]:
    """Let ``scaled_dot_product_attention`` on the CPU run a GPU's kernels in a block.

    Yields:
        The calls so far, by kernel: ``flash``, ``flash backward``, ``efficient``, ``efficient backward``.
    """
    calls: Counter[str] = Counter()
    library = torch.library.Library("aten", "IMPL")
    kernels = _Kernels(calls)
    library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
    library.impl("_scaled_dot_product_flash_attention", kernels.flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", kernels.flash_backward, "CPU")
    library.impl("_scaled_dot_product_efficient_attention", kernels.efficient, "CPU")
    library.impl("_scaled_dot_product_efficient_attention_backward", kernels.efficient_backward, "CPU")
    try:
        yield calls
    finally:
        library._destroy()


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    call = SdpaCall(*args, **kwargs, capability=CAPABILITY)
    backend = choose_sdpa(call).backend
    if backend == "math":  # outside a ring, which has no handler for it
        return torch.ops.aten._scaled_dot_product_attention_math(
            *call.operands,
            call.attn_mask,
            call.dropout_p,
            call.is_causal,
            scale=call.scale,
            enable_gqa=call.enable_gqa,
        )[0]
    assert call.attn_mask is None, "the ring takes no mask"
    if backend == "flash":
        assert call.head_size % 8 == 0, "torch pads heads, and DTensor has no rule for that"
        return torch.ops.aten._scaled_dot_product_flash_attention(
            *call.operands, call.dropout_p, call.is_causal, False, scale=call.scale
        )[0]
    assert backend == "efficient", f"the ring has no handler for {backend}"
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        *call.operands, None, True, call.dropout_p, call.is_causal, scale=call.scale
    )[0]


class _Kernels:
    def __init__(self, calls: Counter[str]) -> None:
        self._calls = calls

    def flash(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert query.dtype in (torch.bfloat16, torch.float16), "the flash kernel is of 16-bit types"
        assert not is_causal or query.size(2) == key.size(2)
        self._calls["flash"] += 1
        out_BHTD, lse_BHT = _forward(query, key, value, is_causal, scale)
        nothing = torch.zeros((), dtype=torch.uint64)
        return out_BHTD, lse_BHT, None, None, query.size(2), key.size(2), nothing, nothing, query.new_empty(0)

    def flash_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        self._calls["flash backward"] += 1
        return _backward(grad_out, query, key, value, out, logsumexp, is_causal, scale)

    def efficient(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, ...]:
        assert attn_bias is None
        assert query.size(1) == key.size(1) == value.size(1), "this kernel takes no grouped heads"
        self._calls["efficient"] += 1
        out_BHTD, lse_BHT = _forward(query, key, value, is_causal, scale)
        missing = -query.size(2) % BLOCK
        padded = torch.nn.functional.pad(lse_BHT, (0, missing), value=float("nan"))
        nothing = torch.zeros((), dtype=torch.int64)
        return out_BHTD, padded if compute_log_sumexp else lse_BHT[..., :0], nothing, nothing

    def efficient_backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: Tensor | None,
        out: Tensor,
        logsumexp: Tensor,
        philox_seed: Tensor,
        philox_offset: Tensor,
        dropout_p: float,
        grad_input_mask: list[bool],
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor | None, ...]:
        assert logsumexp.size(2) % BLOCK == 0, "the kernel loads whole blocks"
        self._calls["efficient backward"] += 1
        lse_BHT = logsumexp[..., : query.size(2)]
        return (*_backward(grad_out, query, key, value, out, lse_BHT, is_causal, scale), None)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    scores_BHTS, _, value_BHSD, _ = _scores(query, key, value, is_causal, scale)
    lse_BHT = scores_BHTS.logsumexp(-1)
    out_BHTD = (scores_BHTS - lse_BHT[..., None]).exp() @ value_BHSD
    return _laid_out(out_BHTD.to(query.dtype)), lse_BHT


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse_BHT: Tensor,
    is_causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    scores_BHTS, key_BHSD, value_BHSD, factor = _scores(query, key, value, is_causal, scale)
    weights_BHTS = (scores_BHTS - lse_BHT[..., None]).exp()
    grad_BHTD = grad_out.float()
    of_row_BHT1 = (grad_BHTD * out.float()).sum(-1, keepdim=True)
    of_scores_BHTS = weights_BHTS * (grad_BHTD @ value_BHSD.mT - of_row_BHT1) * factor
    of_query = of_scores_BHTS @ key_BHSD
    of_key = _over_group(of_scores_BHTS.mT @ query.float(), key)
    of_value = _over_group(weights_BHTS.mT @ grad_BHTD, value)
    return tuple(_laid_out(grad.to(query.dtype)) for grad in (of_query, of_key, of_value))  # type: ignore[return-value]


def _scores(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return scores, keys and values of each query head in float32, and the factor of the scores."""
    group = query.size(1) // key.size(1)
    key_BHSD, value_BHSD = (part.float().repeat_interleave(group, dim=1) for part in (key, value))
    factor = query.size(-1) ** -0.5 if scale is None else scale
    scores_BHTS = query.float() @ key_BHSD.mT * factor
    if is_causal:
        later_TS = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool).triu(1)
        scores_BHTS = scores_BHTS.masked_fill(later_TS, float("-inf"))
    return scores_BHTS, key_BHSD, value_BHSD, factor


def _over_group(grad_BHSD: Tensor, key_BKSD: Tensor) -> Tensor:
    return grad_BHSD.unflatten(1, (key_BKSD.size(1), -1)).sum(2)


def _laid_out(tensor_BHTD: Tensor) -> Tensor:
    """Return it with the strides of a kernel's output: tokens before heads."""
    return tensor_BHTD.transpose(1, 2).contiguous().transpose(1, 2)
