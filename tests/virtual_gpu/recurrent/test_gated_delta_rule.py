"""The gated delta rule takes the bytes of flash-linear-attention's kernels, with the package installed here or not."""

import importlib.util

import pytest
import torch
from kernel_calls import TIMING_BUFFER, assert_delta_rule_of_package, call_of_delta_rule, measured

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.recurrent.gated_delta_rule import chunk_gated_delta_rule

BF16, FP32 = 2, 4
B, T, H, G, K, V, M = 2, 200, 2, 4, 128, 64, 64
CHUNKS = 4


def inputs(B=B, T=T, H=H, G=G, K=K, V=V, dtype=torch.bfloat16, *, documents=None, has_state=False):
    """Slices of one tensor, as models pass them; decays in float32."""

    def make():
        mixed = torch.randn(B, T, 2 * H * K + G * V, device="cuda", dtype=dtype, requires_grad=True)
        query, key, value = torch.split(mixed, [H * K, H * K, G * V], dim=-1)
        offsets = None if documents is None else torch.tensor(documents, device="cuda", dtype=torch.int32)
        rows = B if documents is None else len(documents) - 1
        return (
            query.reshape(B, T, H, K),
            key.reshape(B, T, H, K),
            value.reshape(B, T, G, V),
            torch.randn(B, T, G, device="cuda", requires_grad=True),
            torch.randn(B, T, G, device="cuda", dtype=dtype, requires_grad=True),
            torch.randn(rows, G, K, V, device="cuda", requires_grad=True) if has_state else None,
            offsets,
        )

    return make


def test_backward_is_left_heads_of_length_one_a_solved_system_and_no_state():
    found = measured(inputs(), call_of_delta_rule(chunk_gated_delta_rule))
    tokens = B * T
    heads = 2 * tokens * H * K * BF16 + 2 * tokens * H * FP32  # normalised, and the inverse of their lengths
    value = tokens * G * V * BF16
    decay_and_beta = tokens * G * FP32  # beta is the input itself
    solved = tokens * G * M * BF16
    assert found.kept == heads + value + decay_and_beta + solved + value  # the last one is the result


def test_states_of_all_chunks_are_there_while_a_pass_runs():
    found = measured(inputs(), call_of_delta_rule(chunk_gated_delta_rule))
    states = B * CHUNKS * G * K * V * BF16
    assert found.forward_peak - found.kept > states
    assert found.backward_peak - found.kept > 2 * states  # and their gradients


def test_a_state_is_read_for_each_chunk_and_products_are_counted():
    found = measured(inputs(), call_of_delta_rule(chunk_gated_delta_rule))
    of_forward = dict(found.forward)
    tokens, states = B * T, B * CHUNKS * G * K * V * BF16
    keys, of_value_heads, values = tokens * H * K * BF16, tokens * G * K * BF16, tokens * G * V * BF16
    assert (
        of_forward["chunk_gated_delta_rule_fwd_kernel_h_blockdim64"]
        == keys + of_value_heads + 2 * values + tokens * G * FP32 + states
    )
    flops = dict(found.flops)
    filled = B * CHUNKS * M * G
    assert flops["chunk_gated_delta_rule_fwd_kernel_h_blockdim64"] == 2 * filled * 2 * K * V
    assert flops["chunk_fwd_kernel_o"] == 2 * filled * (K * V + M * (K + V))


def test_each_kernel_takes_the_buffer_of_its_tuning_once():
    with VirtualGPU("a100-80gb") as gpu:
        taken = []
        for _ in range(2):
            before = len(gpu.recorder.timeline.allocations)
            call_of_delta_rule(chunk_gated_delta_rule)(*inputs()())
            born = gpu.recorder.timeline.allocations[before:]
            taken.append(sum(one.size_bytes == TIMING_BUFFER for one in born))
    assert taken == [6, 0]


def test_what_the_package_refuses_is_refused():
    with VirtualGPU("a100-80gb"):
        with pytest.raises(UserError, match="heads of at most 256 channels, got 512"):
            call_of_delta_rule(chunk_gated_delta_rule)(*inputs(K=512)())
        with pytest.raises(UserError, match="a multiple of them of values"):
            call_of_delta_rule(chunk_gated_delta_rule)(*inputs(H=3)())
        with pytest.raises(UserError, match="in one row, got 2 rows"):
            call_of_delta_rule(chunk_gated_delta_rule)(*inputs(documents=[0, 50, T])())
        q, *others = inputs()()
        with pytest.raises(ValueError, match="cpu tensor"):
            call_of_delta_rule(chunk_gated_delta_rule)(q.cpu(), *others)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("triton", "fla")),
    reason="flash-linear-attention and Triton are not installed here",
)
@pytest.mark.parametrize(
    "sizes, is_normalised",
    [
        ({}, True),
        ({"G": H}, True),
        ({"has_state": True}, True),
        ({"dtype": torch.float16}, False),
        ({"K": 256, "V": 256}, True),
        ({"B": 1, "documents": [0, 50, T]}, True),
    ],
    ids=["shared-keys", "own-keys", "states", "not-normalised", "wide", "documents"],
)
def test_bytes_and_kernels_are_those_of_the_package(sizes, is_normalised):
    from fla.ops.gated_delta_rule import (  # pyright: ignore[reportMissingImports]
        chunk_gated_delta_rule as of_package,
    )

    assert_delta_rule_of_package(
        inputs(**sizes),
        chunk_gated_delta_rule,
        of_package,
        is_normalised=is_normalised,
        has_documents="documents" in sizes,
    )
