"""The gated delta rule by chunks of 64 tokens, as the kernels of flash-linear-attention compute it.

B: rows, T: tokens of a row, H: heads of queries and keys, G: heads of values, K and V: their sizes, N: documents.
Source: flash-linear-attention 0.6.0, ``ops/gated_delta_rule/`` (``chunk.py``, ``chunk_fwd.py``, ``wy_fast.py``),
``ops/common/chunk_o.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowmem_ft.virtual_gpu.recurrent.delta_rule_chunks import (
    BLOCK_TOKENS,
    CHUNK_TOKENS,
    Chunks,
    check_shapes,
    chunks_of,
    flops_of_inverse,
    gradients_of_states,
    key_tile,
    normalised,
    normalised_backward,
    of_shared_heads,
    states_of_chunks,
    summed_decay,
)
from lowmem_ft.virtual_gpu.recurrent.package_kernels import contiguous, triton_kernel


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute ``fla.ops.gated_delta_rule.chunk_gated_delta_rule`` on fake tensors.

    Args:
        q: queries, B x T x H x K.
        k: keys, likewise.
        v: values, B x T x G x V.
        g: logarithms of the decay, B x T x G.
        beta: B x T x G.
        scale: factor of the queries.
        initial_state: N x G x K x V.
        output_final_state: whether to return the last state.
        use_qk_l2norm_in_kernel: whether queries and keys are normalised first.
        cu_seqlens: offsets of documents end to end, N + 1; B is then 1.

    Returns:
        The outputs, B x T x G x V, and the last state, N x G x K x V in float32, if it is asked for.

    Raises:
        UserError: for shapes that the package refuses.
    """
    check_shapes(q, k, v, cu_seqlens)
    return _ChunkGatedDeltaRule.apply(
        q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


class _ChunkGatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta, initial_state, output_final_state, is_normalised, cu_seqlens = given
        copies: Any = contiguous(q, k, v, g, beta, initial_state)  # they live to the end
        q, k, v, g, beta, initial_state = copies
        q_scale = k_scale = None
        if is_normalised:
            q, q_scale = normalised(q)
            k, k_scale = normalised(k)
        chunks = chunks_of(v, cu_seqlens)
        g = summed_decay(g, chunks)
        solved = torch.zeros(*v.shape[:3], CHUNK_TOKENS, dtype=k.dtype, device=k.device)
        triton_kernel(
            "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
            (k, g, beta, cu_seqlens, chunks.indices),
            (solved,),
            flops=_flops_of_solving(chunks, k.shape[3]),
        )
        w, u = _w_and_u(k, v, beta, solved, g, chunks)
        states, v_new, final_state = states_of_chunks(
            k, w, u, g, initial_state, chunks, output_final_state=output_final_state
        )
        outputs = torch.empty_like(v_new)
        triton_kernel(
            "chunk_fwd_kernel_o",
            (q, k, v_new, states, g, cu_seqlens, chunks.indices),
            (outputs,),
            flops=2
            * chunks.num_tokens
            * (k.shape[3] * v.shape[3] + CHUNK_TOKENS * (k.shape[3] + v.shape[3])),
        )
        ctx.chunks = chunks
        ctx.save_for_backward(q, q_scale, k, k_scale, v, g, beta, solved, initial_state)
        return outputs, final_state

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, q_scale, k, k_scale, v, g, beta, solved, initial_state = ctx.saved_tensors
        d_outputs, d_final_state = contiguous(*gradients)
        assert d_outputs is not None
        d_q, d_k, d_v, d_g, d_beta, d_state = _gradients(
            q, k, v, g, beta, solved, initial_state, d_outputs, d_final_state, ctx.chunks
        )
        if q_scale is not None:
            d_q = normalised_backward(q, q_scale, d_q)
            d_k = normalised_backward(k, k_scale, d_k)
        return d_q, d_k, d_v, d_g.to(g.dtype), d_beta.to(beta.dtype), d_state, None, None, None


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    solved: Tensor,
    initial_state: Tensor | None,
    d_outputs: Tensor,
    d_final_state: Tensor | None,
    chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients; as in the package, all that is computed on the way lives to the end."""
    K, V = k.shape[3], v.shape[3]
    w, u = _w_and_u(k, v, beta, solved, g, chunks)
    states, v_new, _ = states_of_chunks(k, w, u, g, initial_state, chunks, output_final_state=False)
    d_v = torch.empty_like(d_outputs)
    triton_kernel(
        "chunk_bwd_kernel_dv_local",
        (q, k, d_outputs, g, chunks.cu_seqlens, chunks.indices),
        (d_v,),
        flops=2 * chunks.num_tokens * CHUNK_TOKENS * (K + V),
    )
    d_states, d_initial_state, d_v = gradients_of_states(
        q, k, w, g, initial_state, d_final_state, d_outputs, d_v, chunks
    )
    d_q, d_k = (q.new_empty(*v.shape[:3], K) for _ in range(2))
    d_g = torch.empty(-(-K // key_tile(K, q)), *g.shape, dtype=torch.float32, device=g.device)
    d_w = torch.empty_like(w)
    triton_kernel(
        "chunk_bwd_kernel_dqkwg",
        (q, k, v_new, g, states, d_outputs, d_states, d_v, chunks.cu_seqlens, chunks.indices),
        (d_q, d_k, d_w, d_g),
        flops=2 * chunks.num_tokens * (3 * K * V + CHUNK_TOKENS * (V + 2 * K)),
    )
    d_q = of_shared_heads(d_q, k)
    d_k = of_shared_heads(d_k, k)
    d_g = d_g.sum(0)
    d_k_too, d_v_too, d_g_too, d_beta = (
        k.new_empty(*v.shape[:3], K),
        torch.empty_like(v),
        torch.empty_like(g),
        torch.empty_like(beta),
    )
    triton_kernel(
        "prepare_wy_repr_bwd_kernel",
        (k, v, beta, g, solved, d_w, d_v, chunks.cu_seqlens, chunks.indices),
        (d_v_too, d_beta, d_g_too),
        updates=(d_k_too,),
        flops=2 * chunks.num_tokens * CHUNK_TOKENS * (5 * K + 2 * V + 2 * CHUNK_TOKENS),
    )
    d_k_too = of_shared_heads(d_k_too, k)
    d_v = d_v_too
    d_k.add_(d_k_too)
    d_g.add_(d_g_too)
    d_g = summed_decay(d_g, chunks, reverse=True)
    return d_q, d_k, d_v, d_g, d_beta, d_initial_state


def _flops_of_solving(chunks: Chunks, key_channels: int) -> int:
    """Count the products of keys in the lower triangle of a chunk's blocks, and those that invert it."""
    blocks = CHUNK_TOKENS // BLOCK_TOKENS
    num_blocks = chunks.num_tokens // CHUNK_TOKENS * (blocks * (blocks + 1) // 2)
    return 2 * num_blocks * BLOCK_TOKENS**2 * key_channels + flops_of_inverse(chunks)


def _w_and_u(
    k: Tensor, v: Tensor, beta: Tensor, solved: Tensor, g: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    w, u = k.new_empty(*v.shape[:3], k.shape[3]), torch.empty_like(v)
    triton_kernel(
        "recompute_w_u_fwd_kernel",
        (k, v, beta, solved, g, chunks.cu_seqlens, chunks.indices),
        (w, u),
        flops=2 * chunks.num_tokens * CHUNK_TOKENS * (k.shape[3] + v.shape[3]),
    )
    return w, u
