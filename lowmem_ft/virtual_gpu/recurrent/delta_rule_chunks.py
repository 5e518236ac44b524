"""Parts of the delta rule in all its forms in flash-linear-attention: chunks, states, sums in chunks, unit heads.

B: rows, T: tokens of a row, H: heads of queries and keys, G: heads of values, K and V: their sizes, C: chunks, N:
documents. Source: flash-linear-attention 0.6.0, ``ops/common/chunk_delta_h.py``, ``ops/utils/cumsum.py``,
``modules/norm/l2norm.py``.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lowmem_ft.virtual_gpu.calls.active import active_gpu
from lowmem_ft.virtual_gpu.recurrent.package_kernels import (
    chunks_of_documents,
    float32_like,
    refusal,
    tile_size,
    triton_kernel,
)

CHUNK_TOKENS = 64
BLOCK_TOKENS = 16
"""Tokens of a chunk, and of a block of it: a chunk's triangular system is inverted by blocks."""
_MOST_KEY_CHANNELS = 256

_INDICES: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakIdKeyDictionary()
"""Each chunk's document and number, and the first chunk of each document, by the documents' offsets."""


@dataclass(frozen=True)
class Chunks:
    """The chunks that a call is cut into.

    Args:
        cu_seqlens: offsets of documents end to end; None: every row is one.
        indices: for each chunk, its document and its number there, where there are offsets.
        first_of: the first chunk of each document, likewise.
        rows: the documents, each with a state.
        num_a_row: chunks of a row.
        num_tokens: tokens of all chunks and value heads, those that fill up the last chunk included.
    """

    cu_seqlens: Tensor | None
    indices: Tensor | None
    first_of: Tensor | None
    rows: int
    num_a_row: int
    num_tokens: int


def check_shapes(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> None:
    """Refuse what flash-linear-attention refuses of queries, keys and values.

    Raises:
        UserError: for such shapes.
    """
    if q.shape[2] != k.shape[2] or v.shape[2] % k.shape[2]:
        got = f"{q.shape[2]} heads of queries, {k.shape[2]} of keys and {v.shape[2]} of values"
        needs = "as many heads of queries as of keys, and a multiple of them of values"
    elif k.shape[3] > _MOST_KEY_CHANNELS:
        got, needs = f"{k.shape[3]} channels", f"heads of at most {_MOST_KEY_CHANNELS} channels"
    elif cu_seqlens is not None and q.shape[0] != 1:
        got, needs = f"{q.shape[0]} rows", "documents end to end in one row"
    else:
        return
    raise refusal("flash-linear-attention", needs, got)


def chunks_of(v: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    """Return how a call is cut, given its values and offsets."""
    B, T, G = v.shape[:3]
    if cu_seqlens is None:
        count = -(-T // CHUNK_TOKENS)
        return Chunks(None, None, None, B, count, B * count * CHUNK_TOKENS * G)
    if cu_seqlens not in _INDICES:  # the package looks once, too, for all layers
        count = chunks_of_documents(cu_seqlens, T, CHUNK_TOKENS)
        _INDICES[cu_seqlens] = (
            cu_seqlens.new_empty(count, 2),
            torch.empty_like(cu_seqlens, dtype=torch.int64),
        )
    indices, first_of = _INDICES[cu_seqlens]
    count = indices.shape[0]
    return Chunks(cu_seqlens, indices, first_of, first_of.numel() - 1, count, count * CHUNK_TOKENS * G)


def states_of_chunks(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    chunks: Chunks,
    *,
    output_final_state: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the state before each chunk, the corrected values, and the last state in float32 if it is asked for."""
    K, G, V = k.shape[3], u.shape[2], u.shape[3]
    states = k.new_empty(k.shape[0], chunks.num_a_row, G, K, V)
    final_state = k.new_zeros(chunks.rows, G, K, V, dtype=torch.float32) if output_final_state else None
    v_new = torch.empty_like(u)
    triton_kernel(
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        (k, u, w, g, initial_state, chunks.cu_seqlens, chunks.first_of),
        (v_new, states, final_state),
        flops=4 * chunks.num_tokens * K * V,
    )
    return states, v_new, final_state


def gradients_of_states(
    q: Tensor,
    k: Tensor,
    w: Tensor,
    g: Tensor | None,
    initial_state: Tensor | None,
    d_final_state: Tensor | None,
    d_outputs: Tensor,
    d_v: Tensor,
    chunks: Chunks,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of the states, of the first one, and of the corrected values."""
    K, G, V = k.shape[3], d_outputs.shape[2], d_outputs.shape[3]
    d_states = q.new_empty(q.shape[0], chunks.num_a_row, G, K, V)
    d_initial_state = None if initial_state is None else float32_like(initial_state)
    d_v_new = torch.empty_like(d_v)
    triton_kernel(
        "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
        (q, k, w, g, d_final_state, d_outputs, d_v, chunks.cu_seqlens, chunks.first_of),
        (d_initial_state, d_states, d_v_new),
        flops=6 * chunks.num_tokens * K * V,
    )
    return d_states, d_initial_state, d_v_new


def flops_of_inverse(chunks: Chunks) -> int:
    """Count the products of blocks that invert the triangular systems of all chunks."""
    blocks = CHUNK_TOKENS // BLOCK_TOKENS
    products = sum((distance + 1) * (blocks - distance) for distance in range(1, blocks))
    return 2 * chunks.num_tokens // CHUNK_TOKENS * products * BLOCK_TOKENS**3


def summed_decay(g: Tensor, chunks: Chunks, *, reverse: bool = False) -> Tensor:
    """Return decays summed within chunks, in float32."""
    summed = float32_like(g)
    triton_kernel(
        f"chunk_local_cumsum_{'scalar' if g.dim() == 3 else 'vector'}_kernel",
        (g, chunks.cu_seqlens, chunks.indices),
        (summed,),
        tuned_for=reverse,
    )
    return summed


def normalised(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Return heads of length 1, and the inverse of each one's length."""
    rows = heads.view(-1, heads.shape[-1])
    normalised = torch.empty_like(rows)
    scale = torch.empty(rows.shape[0], dtype=torch.float32, device=heads.device)
    triton_kernel("l2norm_fwd_kernel", (rows,), (normalised, scale))
    return normalised.view(heads.shape), scale.view(heads.shape[:-1])


def normalised_backward(normalised: Tensor, scale: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient of heads before they were given length 1."""
    result = torch.empty_like(normalised)
    triton_kernel("l2norm_bwd_kernel", (normalised, scale, gradient), (result,))
    return result


def of_shared_heads(gradient: Tensor, k: Tensor) -> Tensor:
    """Return the gradient of queries or keys, given that by head of values."""
    B, T, G, K = gradient.shape
    H = k.shape[2]
    return gradient if G == H else gradient.view(B, T, H, G // H, K).sum(3)


def key_tile(key_channels: int, q: Tensor) -> int:
    """Return the channels of keys in a tile of the largest kernel, by the shared memory of a block."""
    capability = active_gpu().spec.compute_capability
    if capability in ((8, 0), (8, 7)) or capability[0] in (9, 10):
        most = 128 if q.element_size() == 2 or capability[0] > 8 else 64
    else:
        most = 64 if capability in ((8, 6), (8, 9), (12, 0), (12, 1)) else 32
    return tile_size(key_channels, most)
