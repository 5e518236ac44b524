"""Kimi delta attention, with a decay for each channel of a key, as the kernels of flash-linear-attention compute it.

B: rows, T: tokens of a row, H: heads of queries and keys, G: heads of values, K and V: their sizes, N: documents.
Source: flash-linear-attention 0.6.0, in ``ops/``: ``kda/chunk.py``, ``kda/chunk_fwd.py``, ``kda/chunk_intra.py``,
``kda/chunk_bwd.py``, ``kda/wy_fast.py``, ``gla/chunk.py``.
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
    normalised,
    normalised_backward,
    of_shared_heads,
    states_of_chunks,
    summed_decay,
)
from lowmem_ft.virtual_gpu.recurrent.package_kernels import contiguous, float32_like, refusal, triton_kernel

_MOST_CHANNELS_OF_A_TILE = 32


def chunk_kda(
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
    """Compute ``fla.ops.kda.chunk_kda`` on fake tensors.

    Args:
        q: queries, B x T x H x K.
        k: keys, likewise.
        v: values, B x T x G x V.
        g: logarithms of the decay, B x T x G x K.
        beta: B x T x G.
        scale: factor of the queries.
        initial_state: N x G x K x V in float32.
        output_final_state: whether to return the last state.
        use_qk_l2norm_in_kernel: whether queries and keys are normalised first.
        cu_seqlens: offsets of documents end to end, N + 1; B is then 1.

    Returns:
        The outputs, B x T x G x V, and the last state, N x G x K x V in float32, if it is asked for.

    Raises:
        UserError: for shapes that the package refuses.
    """
    check_shapes(q, k, v, cu_seqlens)
    if initial_state is not None and initial_state.dtype != torch.float32:
        raise refusal("flash-linear-attention", "a first state in float32", str(initial_state.dtype))
    return _KimiDeltaAttention.apply(
        q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )


class _KimiDeltaAttention(torch.autograd.Function):
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
        outputs, *kept, final_state = _outputs(q, k, v, g, beta, initial_state, chunks, output_final_state)
        ctx.chunks = chunks
        ctx.save_for_backward(q, q_scale, k, k_scale, v, g, beta, *kept, initial_state)
        return outputs, final_state

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        q, q_scale, k, k_scale, v, g, beta, summed, scores, solved, initial_state = ctx.saved_tensors
        d_outputs, d_final_state = contiguous(*gradients)
        assert d_outputs is not None
        d_q, d_k, d_v, d_g, d_beta, d_state = _gradients(
            *(q, k, v, summed, beta, scores, solved, initial_state, d_outputs, d_final_state, ctx.chunks)
        )
        if q_scale is not None:
            d_q = normalised_backward(q, q_scale, d_q)
            d_k = normalised_backward(k, k_scale, d_k)
        results = d_q.to(q.dtype), d_k.to(k.dtype), d_v, d_g.to(g.dtype), d_beta.to(beta.dtype)
        return *results, d_state, None, None, None


def _outputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    chunks: Chunks,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the outputs, the decays summed in chunks, both kinds of scores in them, and the last state."""
    K, V = k.shape[3], v.shape[3]
    summed = summed_decay(g, chunks)
    scores = k.new_empty(*v.shape[:3], CHUNK_TOKENS)
    solved = torch.zeros(*v.shape[:3], CHUNK_TOKENS, dtype=k.dtype, device=k.device)
    w, u, scaled_keys = _solved(q, k, v, beta, summed, scores, solved, chunks)
    states, v_new, final_state = states_of_chunks(
        scaled_keys, w, u, summed, initial_state, chunks, output_final_state=output_final_state
    )
    outputs = torch.zeros_like(v_new)
    triton_kernel(
        "chunk_gla_fwd_kernel_o",
        (q, v_new, summed, states, scores, chunks.cu_seqlens, chunks.indices),
        (outputs,),
        flops=2 * chunks.num_tokens * V * (K + CHUNK_TOKENS),
    )
    return outputs, summed, scores, solved, final_state


def _solved(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    summed: Tensor,
    scores: Tensor,
    solved: Tensor,
    chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill scores and the solved system; return what they make of keys and values, and keys at their chunk's end."""
    diagonal = k.new_empty(*v.shape[:3], BLOCK_TOKENS, dtype=torch.float32)
    K = k.shape[3]
    triton_kernel(
        "chunk_kda_fwd_kernel_intra_token_parallel",
        (q, k, summed, beta, chunks.cu_seqlens),
        (scores, diagonal),
        flops=2 * chunks.num_tokens * BLOCK_TOKENS * K,
    )
    blocks = CHUNK_TOKENS // BLOCK_TOKENS
    below_diagonal = blocks * (blocks - 1) // 2
    num_chunks = chunks.num_tokens // CHUNK_TOKENS
    triton_kernel(
        "chunk_kda_fwd_kernel_inter_solve_fused",
        (q, k, summed, beta, diagonal, chunks.cu_seqlens, chunks.indices),
        (scores, solved),
        flops=4 * num_chunks * below_diagonal * BLOCK_TOKENS**2 * K + flops_of_inverse(chunks),
    )
    w, u, _, scaled_keys = _w_and_u(None, k, v, beta, summed, solved, chunks)
    return w, u, scaled_keys


def _w_and_u(
    q: Tensor | None, k: Tensor, v: Tensor, beta: Tensor, summed: Tensor, solved: Tensor, chunks: Chunks
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    shape = *v.shape[:3], k.shape[3]
    w, u = k.new_empty(shape), torch.empty_like(v)
    scaled_queries = None if q is None else k.new_empty(shape)
    scaled_keys = k.new_empty(shape)
    triton_kernel(
        "recompute_w_u_fwd_kda_kernel",
        (k, q, v, beta, solved, summed, chunks.cu_seqlens, chunks.indices),
        (scaled_queries, scaled_keys, w, u),
        flops=2 * chunks.num_tokens * CHUNK_TOKENS * (k.shape[3] + v.shape[3]),
        tuned_for=q is None,
    )
    return w, u, scaled_queries, scaled_keys


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    summed: Tensor,
    beta: Tensor,
    scores: Tensor,
    solved: Tensor,
    initial_state: Tensor | None,
    d_outputs: Tensor,
    d_final_state: Tensor | None,
    chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients; as in the package, all that is computed on the way lives to the end."""
    K, V = k.shape[3], v.shape[3]
    w, u, scaled_queries, scaled_keys = _w_and_u(q, k, v, beta, summed, solved, chunks)
    assert scaled_queries is not None
    states, v_new, _ = states_of_chunks(
        scaled_keys, w, u, summed, initial_state, chunks, output_final_state=False
    )
    d_scores = v.new_empty(*v.shape[:3], CHUNK_TOKENS, dtype=torch.float32)
    d_v = torch.empty_like(d_outputs)
    triton_kernel(
        "chunk_kda_bwd_kernel_dAv",
        (v_new, scores, d_outputs, chunks.cu_seqlens, chunks.indices),
        (d_v, d_scores),
        flops=4 * chunks.num_tokens * CHUNK_TOKENS * V,
    )
    d_states, d_initial_state, d_v = gradients_of_states(
        scaled_queries, scaled_keys, w, summed, initial_state, d_final_state, d_outputs, d_v, chunks
    )
    d_q, d_k = (summed.new_empty(*v.shape[:3], K, dtype=torch.float32) for _ in range(2))
    d_v_too, d_g, d_beta, d_solved = (
        torch.empty_like(v),
        float32_like(summed),
        float32_like(beta),
        float32_like(solved),
    )
    triton_kernel(
        "chunk_kda_bwd_kernel_wy_dqkg_fused",
        (
            *(q, k, v, v_new, summed, beta, solved, states, d_outputs, d_states, d_v),
            *(chunks.cu_seqlens, chunks.indices),
        ),
        (d_q, d_k, d_v_too, d_g, d_beta, d_solved),
        flops=2 * chunks.num_tokens * (3 * K * V + 2 * CHUNK_TOKENS * (K + V + CHUNK_TOKENS)),
    )
    d_v = d_v_too
    d_q, d_k, d_beta, d_g = _gradients_within_chunks(
        q, k, summed, beta, d_scores, d_solved, d_q, d_k, d_beta, d_g, chunks
    )
    d_q = of_shared_heads(d_q, k)
    d_k = of_shared_heads(d_k, k)
    d_g = summed_decay(d_g, chunks, reverse=True)
    return d_q, d_k, d_v, d_g, d_beta, d_initial_state


def _gradients_within_chunks(
    q: Tensor,
    k: Tensor,
    summed: Tensor,
    beta: Tensor,
    d_scores: Tensor,
    d_solved: Tensor,
    d_q: Tensor,
    d_k: Tensor,
    d_beta: Tensor,
    d_g: Tensor,
    chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, beta and decays with what chunks add to them."""
    tiles = -(-k.shape[3] // _MOST_CHANNELS_OF_A_TILE)
    d_q_too, d_k_too = torch.empty_like(d_q), torch.empty_like(d_k)
    sums = beta.new_empty(tiles, *beta.shape, dtype=torch.float32)
    d_g_too = float32_like(d_g)
    triton_kernel(
        "chunk_kda_bwd_kernel_intra",
        (
            *(q, k, summed, beta, d_scores, d_solved, d_q, d_k, d_g),
            *(chunks.cu_seqlens, chunks.indices),
        ),
        (d_q_too, d_k_too, d_g_too, sums),
        flops=4 * chunks.num_tokens * CHUNK_TOKENS * k.shape[3],
    )
    return d_q_too, d_k_too, sums.sum(0).add_(d_beta), d_g_too
