"""Mamba-2's scan and mixer take the bytes of mamba-ssm's kernels, with the package installed here or not."""

import importlib.util

import pytest
import torch
from kernel_calls import measured

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.recurrent.mamba2 import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

BF16, FP32 = 2, 4
B, T, H, P, G, N, M, WIDTH, OUT = 2, 200, 8, 64, 2, 128, 64, 4, 96
CHUNKS = 4
INPUTS = B * T * H * P * BF16


def one(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)


def scan_inputs(dtype=torch.bfloat16, *, has_state=False, has_documents=False):
    def make():
        joined = one(B, T, H * P + 2 * G * N, dtype=dtype)
        x, b, c = torch.split(joined, [H * P, G * N, G * N], dim=-1)
        return (
            x.view(B, T, H, P),
            one(B, T, H, dtype=dtype),
            one(H, dtype=torch.float32),
            b.view(B, T, G, N),
            c.view(B, T, G, N),
            one(H),
            one(H),
            one(B, H, P, N, dtype=dtype) if has_state else None,
            torch.zeros(B, T, device="cuda", dtype=torch.int32) if has_documents else None,
        )

    return make


def scan_of(function, chunk_size=M):
    def call(x, dt, a, b, c, d, dt_bias, state, numbers):
        return function(
            x,
            dt,
            a,
            b,
            c,
            chunk_size=chunk_size,
            D=d,
            z=None,
            dt_bias=dt_bias,
            initial_states=state,
            seq_idx=numbers,
            dt_softplus=True,
            return_final_states=state is not None,
        )

    return call


def mixer_inputs(*, has_norm=True, has_bias=False, channels=H * P + 2 * G * N):
    def make():
        torch.mm(one(8, 8).detach(), one(8, 8).detach())  # the library's workspace stays
        return (
            one(B, T, H * P + channels + H),
            one(channels, WIDTH),
            one(channels),
            one(H),
            one(H, dtype=torch.float32),
            one(H),
            one(H * P) if has_norm else None,
            one(OUT, H * P),
            one(OUT) if has_bias else None,
        )

    return make


def mixer_of(function):
    def call(joined, weight, bias, dt_bias, a, d, norm, projection, projection_bias):
        return function(
            joined,
            weight,
            bias,
            dt_bias,
            a,
            D=d,
            chunk_size=M,
            rmsnorm_weight=norm,
            outproj_weight=projection,
            outproj_bias=projection_bias,
            headdim=P,
            ngroups=G,
            norm_before_gate=False,
        )

    return call


def test_a_scan_leaves_its_outputs_and_summed_decays():
    found = measured(scan_inputs(), scan_of(mamba_chunk_scan_combined))
    assert found.kept == INPUTS + B * H * CHUNKS * M * FP32


def test_states_are_there_in_float32_and_cast_while_a_scan_runs():
    found = measured(scan_inputs(), scan_of(mamba_chunk_scan_combined))
    states = B * CHUNKS * H * P * N
    assert found.forward_peak > states * (FP32 + BF16)
    assert found.backward_peak - found.kept > 3 * states * FP32
    scan = dict(found.flops)["chunk_scan_fwd_kernel"]
    assert scan == 2 * B * T * H * P * N + B * T * H * P * M


def test_the_mixer_keeps_what_it_is_given_and_the_scan_of_it_alone():
    found = measured(mixer_inputs(), mixer_of(mamba_split_conv1d_scan_combined))
    scales, result = B * T * G * FP32, B * T * OUT * BF16
    assert found.kept == INPUTS + scales + result
    names = [name for name, _ in found.backward]
    assert names.count("causal_conv1d_fwd") == 1  # again, in place of keeping it
    assert names.count("chunk_state_fwd_kernel") == 1


def test_a_packed_projection_is_refused_with_the_way_out():
    with VirtualGPU("a100-80gb"):
        given = mixer_inputs()()
        projection, bias = given[-2:]
        packed = torch.zeros(projection.numel() // 2, 1, dtype=torch.uint8, device="cuda")
        with pytest.raises(
            UserError, match=r"a plain tensor, .* got one that is packed \(uint8\).*--without-packages"
        ):
            mixer_of(mamba_split_conv1d_scan_combined)(*given[:-2], packed, bias)


def test_channels_that_the_convolution_refuses_are_refused():
    with VirtualGPU("a100-80gb"):
        given = mixer_inputs(channels=H * P + 2 * G * 30 + 4)()
        with pytest.raises(UserError, match="a multiple of 8 channels"):
            mixer_of(mamba_split_conv1d_scan_combined)(*given)


needs_package = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "mamba_ssm", "causal_conv1d")),
    reason="mamba-ssm and Triton are not installed here",
)


def without_convolutions(kernels):
    return [one for one in kernels if not one[0].startswith("causal_conv1d")]


@needs_package
@pytest.mark.parametrize(
    "sizes, chunk_size",
    [({}, 64), ({"has_state": True}, 64), ({"has_documents": True}, 64), ({"dtype": torch.float16}, 256)],
)
def test_bytes_and_kernels_of_the_scan_are_those_of_the_package(sizes, chunk_size):
    from mamba_ssm.ops.triton.ssd_combined import (  # pyright: ignore[reportMissingImports]
        mamba_chunk_scan_combined as of_package,
    )

    ours = measured(scan_inputs(**sizes), scan_of(mamba_chunk_scan_combined, chunk_size))
    theirs = measured(scan_inputs(**sizes), scan_of(of_package, chunk_size))
    assert vars(ours) | {"flops": None} == vars(theirs) | {"flops": None}


@needs_package
@pytest.mark.parametrize("sizes", [{}, {"has_norm": False}, {"has_bias": True}])
def test_bytes_and_kernels_of_the_mixer_are_those_of_the_package(sizes):
    from mamba_ssm.ops.triton.ssd_combined import (  # pyright: ignore[reportMissingImports]
        mamba_split_conv1d_scan_combined as of_package,
    )

    ours = measured(mixer_inputs(**sizes), mixer_of(mamba_split_conv1d_scan_combined))
    theirs = measured(mixer_inputs(**sizes), mixer_of(of_package))
    for found in (ours, theirs):
        found.forward, found.backward = map(without_convolutions, (found.forward, found.backward))
    assert vars(ours) | {"flops": None} == vars(theirs) | {"flops": None}
