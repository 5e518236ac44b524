"""Mamba's selective scan, alone and with all of its mixer after the first projection, as mamba-ssm computes them.

B: rows, T: tokens, D: channels, N: size of a channel's state, R: rank of the time steps, W: weights of a convolution.
The scan multiplies no matrices: its kernels count by their bytes. Source: mamba-ssm 2.3.2,
``ops/selective_scan_interface.py``, ``csrc/selective_scan/selective_scan.cpp``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lowmem_ft.virtual_gpu.recurrent.causal_convolution import convolution_gradients, convolved
from lowmem_ft.virtual_gpu.recurrent.package_kernels import (
    check_plain,
    compiled_kernel,
    refusal,
    triton_kernel,
)

_TOKENS_OF_A_CHUNK = 2048
_MOST_STATES = 256


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Any:
    """Compute ``mamba_ssm.ops.selective_scan_interface.selective_scan_fn`` on fake tensors.

    Args:
        u: inputs, B x D x T.
        delta: time steps, likewise.
        A: decays, D x N.
        B: input matrices, B x N x T.
        C: output matrices, likewise.
        D: weights of the inputs in the outputs, D in float32.
        z: gates of the outputs, as ``u``.
        delta_bias: added to time steps, D in float32.
        delta_softplus: changes no bytes.
        return_last_state: whether to return the last state, too.

    Returns:
        The outputs, as ``u``, with the last state, B x D x N, if it is asked for.

    Raises:
        UserError: for states that the package refuses.
    """
    return _SelectiveScan.apply(u, delta, A, B, C, D, z, delta_bias, return_last_state)


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        u, delta, a, b, c, d, z, bias, return_last_state = given
        u, delta, b, c = (_by_token(one) for one in (u, delta, b, c))
        d = None if d is None else d.contiguous()
        z = None if z is None else _by_token(z)
        ctx.are_shared = b.dim() == 3, c.dim() == 3
        b, c = (one.unsqueeze(1) if one.dim() == 3 else one for one in (b, c))
        outputs, states, gated = _scanned(u, delta, a, b, c, d, z, bias)
        ctx.save_for_backward(u, delta, a, b, c, d, z, bias, states, None if z is None else outputs)
        result = outputs if gated is None else gated
        return (result, states[:, :, -1, 1::2]) if return_last_state else result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        d_outputs = _by_token(gradients[0])
        d_u, d_delta, d_a, d_b, d_c, d_d, d_bias, d_z, _ = _scan_gradients(
            *ctx.saved_tensors, d_outputs=d_outputs
        )
        of_b, of_c = ctx.are_shared
        d_b, d_c = d_b.squeeze(1) if of_b else d_b, d_c.squeeze(1) if of_c else d_c
        return d_u, d_delta, d_a, d_b, d_c, d_d, d_z, d_bias, None


def _by_token(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _scanned(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the outputs, the states at the ends of chunks, and the gated outputs."""
    if a.shape[1] > _MOST_STATES:
        raise refusal("mamba-ssm", f"at most {_MOST_STATES} states a channel", str(a.shape[1]))
    gated = None if z is None else torch.empty_like(z)
    outputs = torch.empty_like(delta)
    chunks = -(-u.shape[2] // _TOKENS_OF_A_CHUNK)
    states = torch.empty(*u.shape[:2], chunks, 2 * a.shape[1], dtype=a.dtype, device=u.device)
    compiled_kernel("selective_scan_fwd", (u, delta, a, b, c, d, z, bias), (outputs, states, gated))
    return outputs, states, gated


def _scan_gradients(
    u: Tensor,
    delta: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    bias: Tensor | None,
    states: Tensor,
    outputs: Tensor | None,
    *,
    d_outputs: Tensor,
    d_z: Tensor | None = None,
    recompute_gated: bool = False,
) -> tuple[Any, ...]:
    """Return the gradients of u, delta, a, b, c, d, the bias and z, and the gated outputs if they are recomputed."""
    gated = None
    if z is not None:
        d_z = torch.empty_like(z) if d_z is None else d_z
        if recompute_gated:
            assert outputs is not None
            gated = torch.empty_like(outputs)
    d_u, d_delta, d_a = torch.empty_like(u), torch.empty_like(delta), torch.zeros_like(a)
    d_b, d_c = (torch.zeros_like(one, dtype=torch.float32) for one in (b, c))
    d_d = None if d is None else torch.zeros_like(d)
    d_bias = None if bias is None else torch.zeros_like(bias)
    compiled_kernel(
        "selective_scan_bwd",
        (u, delta, a, b, c, d, z, bias, d_outputs, states, outputs),
        (d_u, d_delta, d_z, gated),
        updates=[one for one in (d_a, d_b, d_c, d_d, d_bias) if one is not None],
    )
    return d_u, d_delta, d_a, d_b.to(b.dtype), d_c.to(c.dtype), d_d, d_bias, d_z, gated


# --- the whole mixer -------------------------------------------------------------------------------------------------


def mamba_inner_fn(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    B: Tensor | None = None,
    C: Tensor | None = None,
    D: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = True,
    b_rms_weight: Tensor | None = None,
    c_rms_weight: Tensor | None = None,
    dt_rms_weight: Tensor | None = None,
    b_c_dt_rms_eps: float = 1e-6,
) -> Tensor:
    """Compute ``mamba_ssm.ops.selective_scan_interface.mamba_inner_fn`` on fake tensors.

    Args:
        xz: inputs and gates, B x 2 D x T.
        conv1d_weight: weight of the short convolution over inputs, D x 1 x W.
        conv1d_bias: likewise.
        x_proj_weight: projection to time steps and both matrices, (R + 2 N) x D.
        delta_proj_weight: projection of time steps, D x R.
        out_proj_weight: weight of the last projection.
        out_proj_bias: likewise.
        A: decays, D x N.
        B: none: it comes from the input.
        C: likewise.
        D: weights of the inputs in the outputs.
        delta_bias: added to time steps.
        delta_softplus: changes no bytes.
        b_rms_weight: weight of a norm of the input matrices.
        c_rms_weight: weight of a norm of the output matrices.
        dt_rms_weight: weight of a norm of the time steps.
        b_c_dt_rms_eps: changes no bytes.

    Returns:
        The mixer's outputs, B x T x hidden size.

    Raises:
        UserError: if a projection's weight is packed, which this function multiplies by itself.
    """
    assert B is None
    assert C is None
    for name, weight in {
        "x_proj": x_proj_weight,
        "dt_proj": delta_proj_weight,
        "out_proj": out_proj_weight,
    }.items():
        check_plain(name, weight)
    return _Mixer.apply(
        *(xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias),
        *(A, D, delta_bias, b_rms_weight, c_rms_weight, dt_rms_weight),
    )


class _Mixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        joined, conv_weight, conv_bias, x_weight, delta_weight, out_weight, out_bias = given[:7]
        a, d, bias, *norms = given[7:]
        if torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")
            x_weight, delta_weight, out_weight = (
                one.to(dtype) for one in (x_weight, delta_weight, out_weight)
            )
            out_bias = None if out_bias is None else out_bias.to(dtype)
        joined = _by_token(joined)
        conv_weight = conv_weight.squeeze(1)
        conv_bias = None if conv_bias is None else conv_bias.contiguous()
        x, z = joined.chunk(2, dim=1)
        convolved_all = convolved(x, conv_weight, conv_bias, None)
        projected = F.linear(_rows(convolved_all), x_weight)
        delta = _steps(delta_weight, projected, x)
        rank, size = delta_weight.shape[1], a.shape[1]
        b = _matrix(projected[:, rank : rank + size], x)
        c = _matrix(projected[:, -size:], x)
        d = None if d is None else d.contiguous()
        b_norm, c_norm, delta_norm = norms
        b = b if b_norm is None else _matrix(_normalised(_columns(b), b_norm), x)
        c = c if c_norm is None else _matrix(_normalised(_columns(c), c_norm), x)
        delta = delta if delta_norm is None else _normalised_steps(delta, delta_norm)
        outputs, states, gated = _scanned(convolved_all, delta, a, b, c, d, z, bias)
        assert gated is not None
        del convolved_all, delta  # computed again in backward
        ctx.has_out_bias = out_bias is not None
        ctx.save_for_backward(
            *(joined, conv_weight, conv_bias, projected, x_weight, delta_weight, out_weight),
            *(a, b, c, d, bias, states, outputs, *norms),
        )
        return F.linear(gated.transpose(1, 2), out_weight, out_bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved = ctx.saved_tensors  # a checkpointed layer gives them once
        joined, conv_weight, conv_bias, projected, x_weight, delta_weight, out_weight = saved[:7]
        a, b, c, d, bias, states, outputs, b_norm, c_norm, delta_norm = saved[7:]
        rank, size = delta_weight.shape[1], a.shape[1]
        x, z = joined.chunk(2, dim=1)
        B, D, T = x.shape
        d_result = _by_token(gradients[0])
        convolved_all = convolved(x, conv_weight, conv_bias, None)
        delta = _steps(delta_weight, projected, x)
        delta = delta if delta_norm is None else _normalised_steps(delta, delta_norm)
        b = b if b_norm is None else _matrix(_normalised(_columns(b), b_norm), x)
        c = c if c_norm is None else _matrix(_normalised(_columns(c), c_norm), x)
        d_joined = torch.empty_like(joined)
        d_x, d_z = d_joined.chunk(2, dim=1)
        d_result = d_result.permute(2, 0, 1).reshape(-1, B * T)
        d_gated = (out_weight.t() @ d_result).view(D, B, T).transpose(0, 1)
        d_convolved, d_delta, d_a, d_b, d_c, d_d, d_bias, d_z, gated = _scan_gradients(
            *(convolved_all, delta, a, b, c, d, z, bias, states, outputs),
            d_outputs=d_gated,
            d_z=d_z,
            recompute_gated=True,
        )
        d_out_weight = torch.einsum("eB,dB->ed", d_result, gated.transpose(0, 1).reshape(D, B * T))
        d_out_bias = d_result.sum(dim=(0, 1)) if ctx.has_out_bias else None
        d_projected = torch.empty_like(projected)
        d_b = _columns(d_b)
        d_projected[:, rank : rank + size] = d_b
        del d_b
        d_c = _columns(d_c)
        d_projected[:, -size:] = d_c
        del d_c
        d_delta = d_delta.transpose(0, 1).reshape(D, B * T)
        d_delta_weight = torch.einsum("dB,Br->dr", d_delta, projected[:, :rank])
        d_projected[:, :rank] = torch.einsum("dB,dr->Br", d_delta, delta_weight)
        d_convolved = d_convolved.transpose(0, 1).reshape(D, B * T)
        d_x_weight = torch.einsum("Br,Bd->rd", d_projected, _rows(convolved_all))
        d_convolved = torch.addmm(d_convolved, x_weight.t(), d_projected.t(), out=d_convolved)
        d_convolved = d_convolved.view(D, B, T).transpose(0, 1)
        _, d_conv_weight, d_conv_bias, _ = convolution_gradients(
            x, conv_weight, conv_bias, d_convolved, None, d_x=d_x
        )
        return (
            *(d_joined, d_conv_weight.unsqueeze(1), d_conv_bias, d_x_weight, d_delta_weight),
            *(d_out_weight, d_out_bias, d_a, d_d, d_bias, None, None, None),
        )


def _rows(channels: Tensor) -> Tensor:
    """Return B x D x T as the rows of a matrix with a column for each channel."""
    return channels.transpose(1, 2).reshape(-1, channels.shape[1])


def _steps(delta_weight: Tensor, projected: Tensor, x: Tensor) -> Tensor:
    """Return time steps, B x D x T, with channels as the slowest dimension."""
    B, D, T = x.shape
    return (delta_weight @ projected[:, : delta_weight.shape[1]].t()).view(D, B, T).transpose(0, 1)


def _matrix(columns: Tensor, x: Tensor) -> Tensor:
    """Return the columns of one of the matrices as B x 1 x N x T."""
    B, _, T = x.shape
    return columns.view(B, T, -1).transpose(1, 2).unsqueeze(1).contiguous()


def _columns(matrix: Tensor) -> Tensor:
    """Return B x 1 x N x T as a column for each state."""
    return matrix.squeeze(1).transpose(1, 2).reshape(-1, matrix.shape[2]).contiguous()


def _normalised_steps(delta: Tensor, weight: Tensor) -> Tensor:
    rows = _normalised(_rows(delta).contiguous(), weight)
    return rows.view(delta.shape[0], delta.shape[2], -1).transpose(1, 2).contiguous()


def _normalised(rows: Tensor, weight: Tensor) -> Tensor:
    rows, weight = _by_token(rows), weight.contiguous()
    result = torch.empty_like(rows)
    scale = rows.new_empty(rows.shape[0], dtype=torch.float32)
    triton_kernel("layer_norm_fwd_1pass_kernel", (rows, weight), (result, scale))
    return result
