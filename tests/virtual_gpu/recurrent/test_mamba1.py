"""Mamba's scan and mixer take the bytes of mamba-ssm's kernels."""

import pytest
import torch
from kernel_calls import measured

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.recurrent.mamba1 import mamba_inner_fn, selective_scan_fn

BF16, FP32 = 2, 4
B, T, D, N, RANK, WIDTH, OUT = 2, 200, 64, 16, 8, 4, 32
ONE = B * D * T * BF16
"""Bytes of inputs, gates, time steps or outputs."""
STATES = B * D * 2 * N * FP32
"""Bytes of the states at the end of a chunk of 2048 tokens."""


def one(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def scan_inputs(*, has_gate=True, states=N):
    """Inputs and time steps by channel, matrices by token, as models pass them."""

    def make():
        matrices = (one(B, T, states).transpose(1, 2) for _ in range(2))
        gate = one(B, D, T) if has_gate else None
        decays = one(D, states, dtype=torch.float32)
        return (
            one(B, D, T),
            one(B, D, T),
            decays,
            *matrices,
            gate,
            *(one(D, dtype=torch.float32) for _ in "ab"),
        )

    return make


def scan_of(function):
    def call(u, delta, a, b, c, gate, d, bias):
        return function(u, delta, a, b, c, D=d, z=gate, delta_bias=bias, delta_softplus=True)

    return call


def mixer_inputs(*, has_norms=False):
    def make():
        torch.mm(one(8, 8).detach(), one(8, 8).detach())  # the library's workspace stays
        weights = one(D, 1, WIDTH), one(D), one(RANK + 2 * N, D), one(D, RANK), one(OUT, D)
        norms = (one(N), one(N), one(D)) if has_norms else (None, None, None)
        decays, d, bias = (one(*shape, dtype=torch.float32) for shape in ((D, N), (D,), (D,)))
        return one(B, T, 2 * D).transpose(1, 2), *weights, decays, d, bias, *norms

    return make


def mixer_of(function):
    def call(joined, conv, conv_bias, x_weight, dt_weight, out_weight, a, d, bias, b_norm, c_norm, dt_norm):
        return function(
            joined,
            conv,
            conv_bias,
            x_weight,
            dt_weight,
            out_weight,
            None,
            a,
            None,
            None,
            d,
            delta_bias=bias,
            b_rms_weight=b_norm,
            c_rms_weight=c_norm,
            dt_rms_weight=dt_norm,
        )

    return call


@pytest.mark.parametrize("has_gate", [True, False])
def test_a_scan_leaves_outputs_states_and_matrices_by_token(has_gate):
    found = measured(scan_inputs(has_gate=has_gate), scan_of(selective_scan_fn))
    matrices = 2 * B * N * T * BF16
    assert found.kept == (2 if has_gate else 1) * ONE + STATES + matrices
    moved = dict(found.forward)["selective_scan_fwd"]
    weights = (D * N + 2 * D) * FP32
    assert moved == (5 if has_gate else 3) * ONE + matrices + weights + STATES


def test_a_mixer_computes_its_convolution_and_time_steps_again():
    found = measured(mixer_inputs(), mixer_of(mamba_inner_fn))
    names = [name for name, _ in found.backward]
    assert names.count("causal_conv1d_fwd") == 1
    joined = 2 * ONE  # by channel, where the input was by token
    projected, matrices = B * T * (RANK + 2 * N) * BF16, 2 * B * N * T * BF16
    assert found.kept == joined + projected + matrices + ONE + STATES + B * T * OUT * BF16


def test_normalised_matrices_are_kept_as_they_are_then():
    plain = measured(mixer_inputs(), mixer_of(mamba_inner_fn))
    found = measured(mixer_inputs(has_norms=True), mixer_of(mamba_inner_fn))
    assert found.kept == plain.kept
    assert [name for name, _ in found.forward].count("layer_norm_fwd_1pass_kernel") == 3


def test_what_the_package_refuses_is_refused():
    with VirtualGPU("a100-80gb"):
        with pytest.raises(UserError, match="at most 256 states a channel, got 300"):
            scan_of(selective_scan_fn)(*scan_inputs(states=300)())
        given = list(mixer_inputs()())
        given[3] = torch.zeros(D, 1, dtype=torch.uint8, device="cuda")
        with pytest.raises(UserError, match=r"the weight of x_proj as a plain tensor.*\(uint8\)"):
            mixer_of(mamba_inner_fn)(*given)
