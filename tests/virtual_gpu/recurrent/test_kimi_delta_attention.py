"""Kimi delta attention takes the bytes of flash-linear-attention's kernels, with the package installed here or not."""

import importlib.util

import pytest
import torch
from kernel_calls import assert_delta_rule_of_package, call_of_delta_rule, measured

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.recurrent.kimi_delta_attention import chunk_kda

BF16, FP32 = 2, 4
B, T, H, K, V, M = 2, 200, 2, 128, 64, 64
CHUNKS = 4


def inputs(B=B, T=T, H=H, G=H, K=K, V=V, dtype=torch.bfloat16, *, documents=None, state_dtype=None):
    def make():
        def one(*shape, dtype=dtype):
            return torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)

        offsets = None if documents is None else torch.tensor(documents, device="cuda", dtype=torch.int32)
        state = None if state_dtype is None else one(B, G, K, V, dtype=state_dtype)
        heads = one(B, T, H, K), one(B, T, H, K), one(B, T, G, V)
        return *heads, one(B, T, G, K, dtype=torch.float32), one(B, T, G), state, offsets

    return make


def test_backward_is_left_unit_heads_summed_decays_and_two_kinds_of_scores():
    found = measured(inputs(), call_of_delta_rule(chunk_kda))
    tokens = B * T
    heads = 2 * tokens * H * (K * BF16 + FP32)
    summed = tokens * H * K * FP32
    scores = 2 * tokens * H * M * BF16
    outputs = tokens * H * V * BF16
    assert found.kept == heads + summed + scores + outputs


def test_gradients_are_summed_in_float32_next_to_states_of_all_chunks():
    found = measured(inputs(), call_of_delta_rule(chunk_kda))
    states = B * CHUNKS * H * K * V * BF16
    assert found.backward_peak - found.kept > 2 * states + 2 * B * T * H * K * FP32
    flops = dict(found.flops)
    filled = B * CHUNKS * M * H
    assert flops["chunk_gla_fwd_kernel_o"] == 2 * filled * V * (K + M)
    assert flops["chunk_kda_bwd_kernel_dAv"] == 2 * filled * 2 * M * V


def test_what_the_package_refuses_is_refused():
    with VirtualGPU("a100-80gb"):
        with pytest.raises(UserError, match="heads of at most 256 channels, got 512"):
            call_of_delta_rule(chunk_kda)(*inputs(K=512)())
        with pytest.raises(UserError, match=r"a first state in float32, got torch\.bfloat16"):
            call_of_delta_rule(chunk_kda)(*inputs(state_dtype=torch.bfloat16)())


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "fla")),
    reason="flash-linear-attention and Triton are not installed here",
)
@pytest.mark.parametrize(
    "sizes, is_normalised",
    [
        ({}, True),
        ({"G": 2 * H}, True),
        ({"state_dtype": torch.float32}, True),
        ({"dtype": torch.float16}, False),
        ({"B": 1, "documents": [0, 50, T]}, True),
    ],
    ids=["own-keys", "shared-keys", "states", "not-normalised", "documents"],
)
def test_bytes_and_kernels_are_those_of_the_package(sizes, is_normalised):
    from fla.ops.kda import chunk_kda as of_package  # pyright: ignore[reportMissingImports]

    assert_delta_rule_of_package(
        inputs(**sizes),
        chunk_kda,
        of_package,
        is_normalised=is_normalised,
        has_documents="documents" in sizes,
    )
