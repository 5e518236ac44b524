"""Mamba-2's scan by chunks, alone and with all of its mixer after the first projection, as mamba-ssm computes them.

B: rows, T: tokens, H: heads, P: their size, G: groups of heads that share input and output matrices, N: size of a
state, C: chunks, M: tokens of a chunk. Sums in a fixed order, for which deterministic algorithms take larger buffers,
are left out. Source: mamba-ssm 2.3.2, ``ops/triton/ssd_*.py``, ``ops/triton/layernorm_gated.py``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_ft.virtual_gpu.recurrent.causal_convolution import (
    CHANNELS_TOGETHER,
    convolution_gradients,
    convolved,
)
from lowmem_ft.virtual_gpu.recurrent.package_kernels import (
    check_plain,
    multiprocessors,
    refusal,
    triton_kernel,
)

_ROWS_OF_A_TILE, _ROWS_OF_A_GATED_TILE = 128, 32
"""Tokens of a tile of the first configuration that an autotuner may choose from, in kernels with sums over tiles."""
_FEWEST_ROWS_OF_A_TILE = 32
_BLOCK_OF_STATES, _SMALLEST_BLOCK_OF_STATES = 64, 64
_MOST_NORM_BYTES = 65536


@dataclass(frozen=True)
class _Sizes:
    """Sizes of a call, by the module's letters, and operations that several kernels have."""

    B: int
    T: int
    H: int
    P: int
    G: int
    N: int
    C: int
    M: int

    @classmethod
    def of(cls, x: Tensor, b: Tensor, chunk_size: int) -> _Sizes:
        B, T, H, P = x.shape
        G, N = b.shape[2:]
        return cls(B, T, H, P, G, N, math.ceil(T / chunk_size), chunk_size)

    @property
    def flops_with_states(self) -> int:
        """Operations of a product of every token's vector with its head's state, or of two that make one."""
        return 2 * self.B * self.T * self.H * self.P * self.N

    @property
    def flops_within_chunks(self) -> int:
        """Operations of a product of every token's vector with those before it in its chunk."""
        return self.B * self.T * self.H * self.M * self.P

    @property
    def flops_of_scores(self) -> int:
        """Operations of a product of every token's vector with all of its chunk's, for each group."""
        return 2 * self.B * self.T * self.G * self.M * self.N

    @property
    def head_splits(self) -> int:
        """Parts into which a group's heads are split, so that every multiprocessor has work."""
        ratio = self.H // self.G
        together = max(min(math.ceil(self.B * self.C * self.H / multiprocessors()), ratio), 1)
        return math.ceil(ratio / together)

    def by_chunk(self, like: Tensor) -> Tensor:
        """Return new memory for a number of every token and head."""
        return torch.empty(self.B, self.H, self.C, self.M, device=like.device, dtype=torch.float32)

    def states(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return new memory for the state of every chunk."""
        return torch.empty(self.B, self.C, self.H, self.P, self.N, device=like.device, dtype=dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
) -> Any:
    """Compute ``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`` on fake tensors.

    Args:
        x: inputs, B x T x H x P.
        dt: time steps, B x T x H.
        A: decays, H.
        B: input matrices, B x T x G x N.
        C: output matrices, likewise.
        chunk_size: tokens of a chunk.
        D: weights of the inputs in the outputs, H or H x P.
        z: gates of the outputs, as ``x``.
        dt_bias: added to time steps, H.
        initial_states: B x H x P x N.
        seq_idx: number of the document of each token, B x T.
        cu_seqlens: not used for outputs.
        dt_softplus: changes no bytes.
        dt_limit: likewise.
        return_final_states: whether to return the last states, too.

    Returns:
        The outputs, as ``x``, with the last states in float32 if they are asked for.
    """
    return _ChunkScan.apply(
        x, dt, A, B, C, chunk_size, D, z, dt_bias, initial_states, seq_idx, return_final_states
    )


class _ChunkScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        x, dt, a, b, c, chunk_size, d, z, dt_bias, initial_states, seq_idx, return_final_states = given
        outputs, ungated, *others = _scanned(
            x, dt, a, b, c, chunk_size, d, z, dt_bias, initial_states, seq_idx
        )
        _, summed, _, final_states = others
        ctx.chunk_size, ctx.return_final_states = chunk_size, return_final_states
        ctx.save_for_backward(
            outputs if z is None else ungated,
            *(x, dt, summed, a, b, c, d, z, dt_bias, initial_states, seq_idx),
        )
        return (outputs, final_states) if return_final_states else outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        outputs, x, dt, _, a, b, c, d, z, dt_bias, initial_states, seq_idx = ctx.saved_tensors
        d_outputs, *d_final = gradients
        d_x, d_dt, d_a, d_b, d_c, d_d, d_z, d_bias, d_initial, _ = _scan_gradients(
            *(d_outputs, x, dt, a, b, c, outputs, ctx.chunk_size, d, z, dt_bias, initial_states, seq_idx),
            d_final_states=d_final[0] if d_final else None,
        )
        return d_x, d_dt, d_a, d_b, d_c, None, d_d, d_z, d_bias, d_initial, None, None


def _scanned(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]:
    """Return outputs, those before gates, time steps, summed decays, states of chunks, and the last ones."""
    sizes = _Sizes.of(x, b, chunk_size)
    b, c = (one if one.stride(-1) == 1 else one.contiguous() for one in (b, c))
    x = x if 1 in (x.stride(-1), x.stride(1)) else x.contiguous()
    if z is not None and 1 not in (z.stride(-1), z.stride(1)):
        z = z.contiguous()
    steps, summed = _summed_steps(sizes, dt, a, dt_bias)
    states = _states_within_chunks(sizes, x, b, steps, summed, seq_idx)
    states, final_states = _passed_on(sizes, states, summed, initial_states, seq_idx, c.dtype)
    scores = _scores(sizes, b, c, seq_idx)
    outputs = x.new_empty(x.shape)
    ungated = None if z is None else x.new_empty(x.shape)
    triton_kernel(
        "chunk_scan_fwd_kernel",
        (x, scores, z, steps, summed, seq_idx, c, states, d),
        (outputs, ungated),
        flops=sizes.flops_with_states + sizes.flops_within_chunks,
    )
    return outputs, ungated, steps, summed, states, final_states


def _scan_gradients(
    d_outputs: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    outputs: Tensor,
    chunk_size: int,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    *,
    d_final_states: Tensor | None = None,
    into: tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None] | None = None,
    recompute_output: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, dt, a, b, c, d, z, the bias and the first states, and the outputs if recomputed.

    ``into`` is memory for the gradients of x, dt, b, c and z.
    """
    sizes = _Sizes.of(x, b, chunk_size)
    d_outputs = d_outputs if d_outputs.stride(-1) == 1 else d_outputs.contiguous()
    d_x, d_dt, d_b, d_c, d_z = into or (None, None, None, None, None)
    d_b, d_c, d_dt = (
        torch.empty_like(like) if memory is None else memory
        for like, memory in ((b, d_b), (c, d_c), (dt, d_dt))
    )
    copied_dt = dt.clone()
    steps, summed = _summed_steps(sizes, copied_dt, a, dt_bias)
    scores = _scores(sizes, b, c, seq_idx)
    states = _states_within_chunks(sizes, x, b, steps, summed, seq_idx)
    states, last = _passed_on(sizes, states, summed, initial_states, seq_idx, torch.float32)
    gated = d_d = None
    if z is not None:
        d_z, d_outputs, d_d, gated = _gate_gradients(
            sizes, x, z, outputs, d_outputs, d, d_z, recompute_output
        )
    d_states = _state_gradients(sizes, d_outputs, c, summed, seq_idx, states.dtype)
    d_states, d_summed_of_chunks, d_initial, states = _passed_back(
        sizes, states, summed, d_states, d_final_states, seq_idx, x.dtype, initial_states is not None
    )
    d_x, d_steps, d_d_of_x = _input_gradients(
        sizes, x, steps, summed, b, scores, d_outputs, d_states, d, seq_idx, d_x
    )
    d_summed_next, d_summed_before, sums = _matrix_gradients(
        sizes, x, b, c, steps, summed, states, d_outputs, d_states, seq_idx, d_b, d_c
    )
    if z is None:
        d_d = d_d_of_x
    d_summed_before[..., -1] += d_summed_of_chunks
    d_summed_before_too = d_summed_before.flip([-1]).cumsum(dim=-1).flip([-1])
    d_summed = _decay_gradients(sizes, x, steps, summed, d_outputs, scores)
    d_summed += d_summed_next + d_summed_before_too
    d_a, d_bias = _step_gradients(d_summed, d_steps, copied_dt, a, dt_bias, d_dt)
    del last, sums  # mamba-ssm's function holds them until it returns, and so they are part of its peak
    return d_x, d_dt, d_a, d_b, d_c, d_d, d_z, d_bias, d_initial, gated


def _summed_steps(sizes: _Sizes, dt: Tensor, a: Tensor, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    steps, summed = sizes.by_chunk(dt), sizes.by_chunk(dt)
    triton_kernel("chunk_cumsum_fwd_kernel", (dt, a, dt_bias), (steps, summed))
    return steps, summed


def _states_within_chunks(
    sizes: _Sizes, x: Tensor, b: Tensor, steps: Tensor, summed: Tensor, seq_idx: Tensor | None
) -> Tensor:
    states = sizes.states(x, torch.float32)
    triton_kernel(
        "chunk_state_fwd_kernel",
        (x, b, steps, summed, seq_idx),
        (states,),
        flops=sizes.flops_with_states,
    )
    return states


def _passed_on(
    sizes: _Sizes,
    states: Tensor,
    summed: Tensor,
    initial_states: Tensor | None,
    seq_idx: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    before = sizes.states(states, dtype)
    last = states.new_empty(sizes.B, sizes.H, sizes.P, sizes.N, dtype=torch.float32)
    triton_kernel(
        "state_passing_fwd_kernel",
        (states, summed[..., -1], initial_states, seq_idx),
        (before, last),
    )
    return before, last


def _passed_back(
    sizes: _Sizes,
    states: Tensor,
    summed: Tensor,
    d_states: Tensor,
    d_final_states: Tensor | None,
    seq_idx: Tensor | None,
    dtype: torch.dtype,
    has_initial_states: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Return the gradients of states within chunks, of the chunks' decays and of first states, and the states cast."""
    result = torch.empty_like(d_states, dtype=dtype)
    cast = states if dtype == states.dtype else torch.empty_like(states, dtype=dtype)
    d_initial = torch.empty_like(result[:, 0]) if has_initial_states else None
    blocks = math.ceil(sizes.P * sizes.N / _SMALLEST_BLOCK_OF_STATES)
    d_summed = states.new_empty(sizes.B, sizes.H, sizes.C, blocks, dtype=torch.float32)
    triton_kernel(
        "state_passing_bwd_kernel",
        (d_states, states, summed[..., -1], d_final_states, seq_idx),
        (result, d_summed, d_initial, None if cast is states else cast),
    )
    used = math.ceil(sizes.P * sizes.N / _BLOCK_OF_STATES)
    return result, d_summed[..., :used].sum(dim=-1), d_initial, cast


def _scores(sizes: _Sizes, b: Tensor, c: Tensor, seq_idx: Tensor | None) -> Tensor:
    scores = c.new_empty(sizes.B, sizes.C, sizes.G, sizes.M, sizes.M, dtype=torch.float32)
    triton_kernel("bmm_chunk_fwd_kernel", (c, b, seq_idx), (scores,), flops=sizes.flops_of_scores)
    return scores


def _gate_gradients(
    sizes: _Sizes,
    x: Tensor,
    z: Tensor,
    outputs: Tensor,
    d_outputs: Tensor,
    d: Tensor | None,
    d_z: Tensor | None,
    recompute_output: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    sums = None if d is None else _sums_of_tiles(sizes, d, d.shape[1] if d.dim() == 2 else 1, zeros=False)
    d_z = torch.empty_like(z) if d_z is None else d_z
    gated = torch.empty_like(x) if recompute_output else None
    d_ungated = torch.empty_like(d_outputs)
    triton_kernel("chunk_scan_bwd_dz_kernel", (d_outputs, outputs, z, x, d), (gated, d_z, d_ungated, sums))
    d_d = None
    if d is not None and sums is not None:
        d_d = sums[: math.ceil(sizes.M / _ROWS_OF_A_GATED_TILE)].sum(dim=(0, 1, 2)).to(d.dtype).view(d.shape)
    return d_z, d_ungated, d_d, gated


def _input_gradients(
    sizes: _Sizes,
    x: Tensor,
    steps: Tensor,
    summed: Tensor,
    b: Tensor,
    scores: Tensor,
    d_outputs: Tensor,
    d_states: Tensor,
    d: Tensor | None,
    seq_idx: Tensor | None,
    d_x: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of inputs, of time steps, and of the inputs' weights."""
    has_size = d is not None and d.dim() == 2
    sums = None if d is None else _sums_of_tiles(sizes, d, sizes.P if has_size else 1, zeros=True)
    d_x = torch.empty_like(x) if d_x is None else d_x
    d_steps = sizes.by_chunk(d_outputs).zero_()
    added = [d_steps]
    if sums is not None:
        added.append(sums.zero_())
    triton_kernel(
        "chunk_scan_chunk_state_bwd_dx_kernel",
        (x, scores, d_outputs, steps, summed, seq_idx, d, b, d_states),
        (d_x, sums if has_size else None),
        updates=added[:1] if has_size else added,
        flops=sizes.flops_with_states + sizes.flops_within_chunks,
    )
    d_d = None
    if d is not None and sums is not None:
        d_d = sums[: math.ceil(sizes.M / _ROWS_OF_A_TILE)].sum(dim=(0, 1, 2))
        d_d = (d_d if has_size else d_d.sum(dim=-1)).to(d.dtype)
    return d_x, d_steps, d_d


def _state_gradients(
    sizes: _Sizes, d_outputs: Tensor, c: Tensor, summed: Tensor, seq_idx: Tensor | None, dtype: torch.dtype
) -> Tensor:
    d_states = sizes.states(c, dtype)
    triton_kernel(
        "chunk_scan_bwd_dstates_kernel",
        (d_outputs, c, summed, seq_idx),
        (d_states,),
        flops=sizes.flops_with_states,
    )
    return d_states


def _matrix_gradients(
    sizes: _Sizes,
    x: Tensor,
    b: Tensor,
    c: Tensor,
    steps: Tensor,
    summed: Tensor,
    states: Tensor,
    d_outputs: Tensor,
    d_states: Tensor,
    seq_idx: Tensor | None,
    d_b: Tensor,
    d_c: Tensor,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Write the gradients of both matrices; return those of decays after and before tokens, and the summed parts."""
    d_b_sums, d_summed_next = _shared_gradients(
        "chunk_state_bwd_db_kernel", sizes, (x, d_states, b, steps, summed, seq_idx)
    )
    torch.cumsum(d_summed_next, dim=-1, out=d_summed_next)
    d_c_sums, d_summed_before = _shared_gradients(
        "chunk_scan_bwd_dc_kernel", sizes, (d_outputs, states, c, summed, seq_idx)
    )
    d_scores = _score_gradients(sizes, x, d_outputs, steps, summed, seq_idx)
    for factor, sums, result in ((c, d_b_sums, d_b), (b, d_c_sums, d_c)):
        triton_kernel(
            "bmm_chunk_bwd_kernel", (factor, d_scores, sums), (result,), flops=sizes.flops_of_scores
        )
    return d_summed_next, d_summed_before, (d_b_sums, d_c_sums, d_scores)


def _score_gradients(
    sizes: _Sizes, x: Tensor, d_outputs: Tensor, steps: Tensor, summed: Tensor, seq_idx: Tensor | None
) -> Tensor:
    splits = x.new_empty(sizes.B, sizes.C, sizes.head_splits, sizes.G, sizes.M, sizes.M, dtype=torch.float32)
    triton_kernel(
        "chunk_scan_bwd_dcb_kernel",
        (x, d_outputs, steps, summed, seq_idx),
        (splits,),
        flops=sizes.flops_within_chunks,
    )
    return splits.sum(2)


def _step_gradients(
    d_summed: Tensor, d_steps: Tensor, dt: Tensor, a: Tensor, dt_bias: Tensor | None, d_dt: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of decays and of the time steps' bias; those of time steps are written into ``d_dt``."""
    d_bias = None if dt_bias is None else torch.empty_like(dt_bias, dtype=torch.float32)
    d_a = torch.empty_like(a, dtype=torch.float32)
    sums = [one.zero_() for one in (d_a, d_bias) if one is not None]
    triton_kernel("chunk_cumsum_bwd_kernel", (d_summed, d_steps, dt, a, dt_bias), (d_dt,), updates=sums)
    return d_a, d_bias


def _sums_of_tiles(sizes: _Sizes, d: Tensor, columns: int, *, zeros: bool) -> Tensor:
    new = torch.zeros if zeros else torch.empty
    tiles = math.ceil(sizes.M / _FEWEST_ROWS_OF_A_TILE)
    return new(tiles, sizes.B, sizes.C, sizes.H, columns, device=d.device, dtype=torch.float32)


def _shared_gradients(name: str, sizes: _Sizes, reads: tuple[Tensor | None, ...]) -> tuple[Tensor, Tensor]:
    """Return the gradient of matrices that a group's heads share, and of the decays."""
    like = reads[0]
    assert like is not None
    d_summed = sizes.by_chunk(like)
    splits = like.new_empty(sizes.B, sizes.T, sizes.head_splits, sizes.G, sizes.N, dtype=torch.float32)
    d_summed.zero_()
    triton_kernel(name, reads, (splits,), updates=(d_summed,), flops=sizes.flops_with_states)
    return splits.sum(2), d_summed


def _decay_gradients(
    sizes: _Sizes, x: Tensor, steps: Tensor, summed: Tensor, d_outputs: Tensor, scores: Tensor
) -> Tensor:
    tiles = x.new_empty(
        *(sizes.B, sizes.H, sizes.C, math.ceil(sizes.M / _FEWEST_ROWS_OF_A_TILE), sizes.M),
        dtype=torch.float32,
    )
    triton_kernel(
        "chunk_scan_bwd_ddAcs_stable_kernel",
        (x, d_outputs, steps, summed, scores),
        (tiles,),
        flops=sizes.flops_within_chunks,
    )
    return tiles[:, :, :, : math.ceil(sizes.M / _FEWEST_ROWS_OF_A_TILE)].sum(dim=3)


# --- the whole mixer -------------------------------------------------------------------------------------------------


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """Compute ``mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined`` on fake tensors.

    Args:
        zxbcdt: gates, inputs, matrices and time steps, B x T x (2 * H * P + 2 * G * N + H).
        conv1d_weight: weight of the short convolution over inputs and matrices.
        conv1d_bias: likewise.
        dt_bias: H.
        A: H.
        D: H or H x P.
        chunk_size: tokens of a chunk.
        initial_states: B x H x P x N.
        seq_idx: number of the document of each token, B x T.
        dt_limit: changes no bytes.
        return_final_states: whether to return the last states, too.
        activation: the convolution's.
        rmsnorm_weight: weight of a norm after the scan, H * P; None: gates without a norm.
        rmsnorm_eps: changes no bytes.
        outproj_weight: weight of the projection after that; None: no projection.
        outproj_bias: likewise.
        headdim: P, if ``D`` does not tell it.
        ngroups: G.
        norm_before_gate: changes no bytes.

    Returns:
        The mixer's outputs, with the last states in float32 if they are asked for.

    Raises:
        UserError: if the projection's weight is packed, which this function multiplies by itself.
    """
    if outproj_weight is not None:
        check_plain("out_proj", outproj_weight)
    return _Mixer.apply(
        *(zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states, seq_idx),
        *(return_final_states, rmsnorm_weight, outproj_weight, outproj_bias),
        *(D.shape[1] if headdim is None else headdim, ngroups),
    )


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        joined, conv_weight, conv_bias, dt_bias, a, d, chunk_size = given[:7]
        initial_states, seq_idx, return_final_states = given[7:10]
        norm_weight, out_weight, out_bias, head_size, groups = given[10:]
        ctx.sizes = chunk_size, head_size, groups
        ctx.return_final_states = return_final_states
        z, convolution, dt = _split(joined, conv_weight, d, head_size)
        seq_idx = None if seq_idx is None else seq_idx.contiguous()
        convolved_all = _convolved_rows(convolution, conv_weight, conv_bias, seq_idx)
        x, b, c = _parts(convolved_all, d, head_size, groups)
        gates = z.view(x.shape) if norm_weight is None else None
        outputs, ungated, *others = _scanned(
            x, dt, a, b, c, chunk_size, d, gates, dt_bias, initial_states, seq_idx
        )
        scale = None
        if norm_weight is None:
            kept = ungated
            outputs = outputs.view(z.shape)
        else:
            kept = outputs
            norm_weight = norm_weight.contiguous()
            outputs, scale = _normalised(outputs, norm_weight, z, groups)
        if out_weight is not None:
            if torch.is_autocast_enabled("cuda"):
                dtype = torch.get_autocast_dtype("cuda")
                outputs, out_weight = outputs.to(dtype), out_weight.to(dtype)
                out_bias = None if out_bias is None else out_bias.to(dtype)
            outputs = F.linear(outputs, out_weight, out_bias)
        ctx.save_for_backward(
            *(joined, conv_weight, conv_bias, kept, a, d, dt_bias, initial_states, seq_idx),
            *(norm_weight, scale, out_weight, out_bias),
        )
        return (outputs, others[-1]) if return_final_states else outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors  # a checkpointed layer gives them once
        joined, conv_weight, conv_bias, kept, a, d, dt_bias, initial_states, seq_idx = saved[:9]
        norm_weight, scale, out_weight, out_bias = saved[9:]
        chunk_size, head_size, groups = ctx.sizes
        d_outputs, *d_final = gradients
        z, convolution, dt = _split(joined, conv_weight, d, head_size)
        recomputed = None
        if out_weight is not None:
            recomputed = kept.new_empty(*kept.shape[:2], d.shape[0] * head_size)
        convolved_all = _convolved_rows(convolution, conv_weight, conv_bias, seq_idx)
        x, b, c = _parts(convolved_all, d, head_size, groups)
        d_joined, d_convolved = torch.empty_like(joined), torch.empty_like(convolution)
        d_z, d_convolution, d_dt = _split(d_joined, conv_weight, d, head_size)
        d_x, d_b, d_c = _parts(d_convolved, d, head_size, groups)
        d_gated = d_outputs if out_weight is None else F.linear(d_outputs, out_weight.t())
        d_scanned, d_norm = d_gated.view(x.shape), None
        if norm_weight is None:
            into = d_x, d_dt, d_b, d_c, d_z.view(x.shape)
        else:
            d_scanned, d_norm = _normalised_backward(
                d_gated, kept, norm_weight, scale, z, groups, d_z, recomputed
            )
            into = d_x, d_dt, d_b, d_c, None
        gates = z.view(x.shape) if norm_weight is None else None
        _, _, d_a, _, _, d_d, _, d_bias, d_initial, gated = _scan_gradients(
            *(d_scanned, x, dt, a, b, c, kept, chunk_size, d, gates, dt_bias, initial_states, seq_idx),
            d_final_states=d_final[0] if d_final else None,
            into=into,
            recompute_output=gates is not None and out_weight is not None,
        )
        d_out_weight = d_out_bias = None
        if out_weight is not None:
            projected = recomputed if gated is None else gated.view(z.shape)
            d_out_weight = torch.einsum("bso,bsd->od", d_outputs, projected)
            d_out_bias = None if out_bias is None else d_outputs.sum(dim=(0, 1))
        d_result, d_conv_weight, d_conv_bias, _ = convolution_gradients(
            _by_channel(convolution),
            conv_weight,
            conv_bias,
            _by_channel(d_convolved),
            seq_idx,
            d_x=_by_channel(d_convolution),
        )
        if d_result.transpose(1, 2).stride() != d_convolution.stride():
            d_convolution.copy_(d_result.transpose(1, 2))
        return (
            *(d_joined, d_conv_weight, d_conv_bias, d_bias, d_a, d_d, None, d_initial, None, None),
            *(d_norm, d_out_weight, d_out_bias, None, None),
        )


def _split(joined: Tensor, conv_weight: Tensor, d: Tensor, head_size: int) -> tuple[Tensor, ...]:
    """Return gates, what is convolved, and time steps."""
    heads = d.shape[0]
    return torch.split(joined, [heads * head_size, conv_weight.shape[0], heads], dim=-1)


def _parts(convolved_all: Tensor, d: Tensor, head_size: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return inputs and both matrices."""
    B, T, width = convolved_all.shape
    inputs = d.shape[0] * head_size
    matrix = (width - inputs) // 2
    x, b, c = torch.split(convolved_all, [inputs, matrix, matrix], dim=-1)
    return (
        x.view(B, T, d.shape[0], head_size),
        b.view(B, T, groups, matrix // groups),
        c.view(B, T, groups, matrix // groups),
    )


def _by_channel(rows: Tensor) -> Tensor:
    """Return rows as B x channels x T, with strides that the convolution takes."""
    return (rows if rows.stride(1) % CHANNELS_TOGETHER == 0 else rows.contiguous()).transpose(1, 2)


def _convolved_rows(rows: Tensor, weight: Tensor, bias: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    return convolved(_by_channel(rows), weight, bias, seq_idx).transpose(1, 2)


def _normalised(outputs: Tensor, weight: Tensor, z: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    rows, gates = outputs.view(-1, weight.shape[0]), z.reshape(-1, weight.shape[0])
    group_size = _group_size(rows, groups)
    result = torch.empty_like(rows)
    scale = rows.new_empty(rows.numel() // group_size, dtype=torch.float32)
    triton_kernel("layer_norm_fwd_1pass_kernel", (rows, weight, gates), (result, scale), is_tuned=False)
    return result.view(z.shape), scale


def _normalised_backward(
    d_outputs: Tensor,
    outputs: Tensor,
    weight: Tensor,
    scale: Tensor,
    z: Tensor,
    groups: int,
    d_z: Tensor,
    recomputed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the scan's outputs and of the weight; that of gates is written into ``d_z``."""
    rows, gates = outputs.view(-1, weight.shape[0]), z.reshape(-1, weight.shape[0])
    d_rows = torch.empty_like(rows)
    block = 1 << (_group_size(rows, groups) - 1).bit_length()
    warps = min(max(block // 256, 1), 8)
    programs = math.ceil(multiprocessors() * math.ceil(4 / warps) / groups)
    d_weight = weight.new_empty(programs, weight.shape[0], dtype=torch.float32)
    triton_kernel(
        "layer_norm_bwd_kernel",
        (rows, weight, gates, d_outputs, scale),
        (recomputed, d_rows, d_weight, d_z),
        is_tuned=False,
    )
    return d_rows.view(outputs.shape), d_weight.sum(0).to(weight.dtype)


def _group_size(rows: Tensor, groups: int) -> int:
    """Return the channels that are normalised together.

    Raises:
        UserError: if the kernel cannot hold them.
    """
    size = rows.shape[1] // groups
    if size > _MOST_NORM_BYTES // rows.element_size():
        most = _MOST_NORM_BYTES // rows.element_size()
        raise refusal("mamba-ssm", f"at most {most} channels that are normalised together", str(size))
    return size
