"""Short convolutions take the bytes of causal-conv1d's kernels."""

import pytest
import torch
from kernel_calls import measured

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.recurrent.causal_convolution import causal_conv1d_fn

B, D, T, W = 2, 64, 40, 4
BF16, FP32 = 2, 4
ONE = B * D * T * BF16
"""Bytes of the input, of the result and of a gradient of either."""


def inputs(D=D, W=W, *, is_channel_last=True, dtype=torch.bfloat16):
    def make():
        shape = (B, T, D) if is_channel_last else (B, D, T)
        x = torch.randn(*shape, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.randn(D, W, device="cuda", dtype=dtype, requires_grad=True)
        bias = torch.randn(D, device="cuda", dtype=dtype, requires_grad=True)
        return x.transpose(1, 2) if is_channel_last else x, weight, bias

    return make


@pytest.mark.parametrize("is_channel_last", [True, False])
def test_only_the_input_is_kept_and_weights_gradients_are_summed_in_float32(is_channel_last):
    found = measured(
        inputs(is_channel_last=is_channel_last), lambda *given: causal_conv1d_fn(*given, activation="silu")
    )
    weights = D * (W + 1)
    assert found.kept == found.forward_peak == ONE
    assert dict(found.forward) == {"causal_conv1d_fwd": 2 * ONE + weights * BF16}
    moved = dict(found.backward)
    assert moved["causal_conv1d_bwd"] == 3 * ONE + weights * (BF16 + 2 * FP32)
    assert found.given == 3 * ONE + weights * BF16  # the result, its gradient, and those of input and weights
    assert 0 <= found.backward_peak - found.given <= weights * FP32


def test_a_gradient_in_another_layout_is_copied():
    def call(x, weight, bias):
        return causal_conv1d_fn(x, weight, bias).contiguous()  # by channel

    assert ("clone", 2 * ONE) in measured(inputs(), call).backward


def test_a_fixed_order_of_sums_takes_a_buffer_for_each_piece(monkeypatch):
    monkeypatch.setenv("CAUSAL_CONV1D_DETERMINISTIC", "1")
    found = measured(inputs(), causal_conv1d_fn)
    names = [name for name, _ in found.backward]
    assert names.count("sum") == 2
    assert found.backward_peak >= found.given + B * D * (W + 1) * FP32


def test_documents_are_told_apart_by_their_numbers():
    def call(x, weight, bias):
        return causal_conv1d_fn(x, weight, bias, torch.zeros(B, T, device="cuda", dtype=torch.int32))

    numbers = B * T * 4
    found = measured(inputs(), call)
    assert found.kept == ONE + numbers
    assert dict(found.forward)["causal_conv1d_fwd"] == 2 * ONE + D * (W + 1) * BF16 + numbers


def test_last_inputs_are_returned_where_they_are_asked_for():
    with VirtualGPU("a100-80gb"):
        _, last = causal_conv1d_fn(*inputs()(), return_final_states=True)
        assert last.shape == (B, D, W - 1)
        assert last.stride(1) == 1


@pytest.mark.parametrize(
    "given, message",
    [
        (inputs(W=5), "2 to 4 weights a channel, got 5"),
        (inputs(D=60), "a multiple of 8 channels, got 60"),
    ],
)
def test_what_the_package_refuses_is_refused(given, message):
    with VirtualGPU("a100-80gb"), pytest.raises(UserError, match=message):
        causal_conv1d_fn(*given())


def test_documents_need_channels_next_to_each_other():
    with VirtualGPU("a100-80gb"):
        by_channel, numbers = (
            inputs(is_channel_last=False)(),
            torch.zeros(B, T, device="cuda", dtype=torch.int32),
        )
        with pytest.raises(UserError, match="channels next to each other"):
            causal_conv1d_fn(*by_channel, numbers)
