"""Recurrent layers as cuDNN computes them: one operator, weights in one buffer, and what it keeps for backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from lowmem_ft.virtual_gpu.gpu import VirtualGPU

UNITS, STEPS, ROWS = 320, 500, 50
KIB = 1024


def names(gpu: VirtualGPU) -> list[str]:
    return [entry.name for entry in gpu.work.entries]


def gradients(layers: nn.Module) -> list[torch.Tensor]:
    return [weight.grad for weight in layers.parameters() if weight.grad is not None]


def stacked(kind: type[nn.LSTM | nn.GRU], **settings) -> nn.LSTM | nn.GRU:
    """The layers of github.com/pytorch/pytorch/issues/2895."""
    return kind(123, UNITS, 4, **settings)


@pytest.mark.parametrize("kind, kept", [(nn.LSTM, 736_000_000), (nn.GRU, 864_000_000)])
def test_what_is_kept_for_backward_is_what_cudnn_kept_in_a_measured_run(kind, kept):
    with VirtualGPU("a100-80gb") as gpu:
        layers = stacked(kind).cuda()
        rows = torch.randn(STEPS, ROWS, 123, device="cuda")
        output, states = layers(rows)
        named = {one.size_bytes for one in gpu.recorder.timeline.allocations}
        assert kept in named
        assert gpu.trace().uncertain_bytes == kept
        assert output.shape == (STEPS, ROWS, UNITS)
        del output, states
        after = gpu.recorder.live_bytes
        layers.eval()(rows)
        assert gpu.recorder.live_bytes == after
    (said,) = (choice for choice in gpu.choices if "cuDNN" in choice)
    assert said.startswith(kind.__name__)
    process = gpu.report().process_range
    assert process is not None
    assert process.high_bytes - process.low_bytes > kept


def test_weights_and_their_gradients_lie_in_one_buffer_each():
    with VirtualGPU("a100-80gb") as gpu:
        layers = stacked(nn.LSTM).cuda()
        assert len({weight.untyped_storage()._cdata for weight in layers.parameters()}) == 1
        num_bytes = sum(weight.nbytes for weight in layers.parameters())
        assert gpu.recorder.live_bytes == num_bytes
        layers(torch.randn(STEPS, ROWS, 123, device="cuda"))[0].sum().backward()
        assert gpu.recorder.live_bytes == 2 * num_bytes
        assert len({gradient.untyped_storage()._cdata for gradient in gradients(layers)}) == 1
    assert names(gpu).count("_cudnn_rnn") == names(gpu).count("_cudnn_rnn_backward") == 1


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_peak_is_that_of_torchs_code_around_cudnn(batch_first):
    """See aten/src/ATen/native/cudnn/RNN.cpp, with the weights as a workspace."""
    shape = (ROWS, STEPS) if batch_first else (STEPS, ROWS)
    with VirtualGPU("a100-80gb") as gpu:
        layers = stacked(nn.GRU, batch_first=batch_first).cuda()
        rows = torch.randn(*shape, 123, device="cuda")
        weights, states, kept = (
            sum(weight.nbytes for weight in layers.parameters()),
            4 * ROWS * UNITS * 4,
            864_000_000,
        )
        output = layers(rows)[0]
        output_bytes = output.nbytes
        transposed = rows.nbytes if batch_first else 0
        before = weights + rows.nbytes
        assert gpu.recorder.peak_bytes == before + 2 * states + output_bytes + kept + weights + transposed
        gradient = torch.ones(output.shape, device="cuda")
        gpu.recorder.reset_peak()
        output.backward(gradient)
        held = before + 2 * output_bytes + states + kept
        of_states = 2 * states  # the gradient of the first ones, and zeros for that of the last ones
        of_output = output_bytes if batch_first else 0
        assert (
            gpu.recorder.peak_bytes == held + rows.nbytes + of_states + 2 * weights + transposed + of_output
        )
    (flops,) = (entry.flops for entry in gpu.work.entries if entry.name == "_cudnn_rnn")
    assert flops == 2 * STEPS * ROWS * sum(
        weight.numel() for weight in layers.parameters() if weight.dim() == 2
    )


def test_layers_without_biases_have_room_for_them():
    """torch always asks cuDNN for two biases a gate (``CUDNN_RNN_DOUBLE_BIAS``)."""
    with VirtualGPU("a100-80gb") as gpu:
        with_biases, without = (stacked(nn.GRU, bias=bias).cuda() for bias in (True, False))
        buffers = [next(layers.parameters()).untyped_storage().nbytes() for layers in (with_biases, without)]
        without(torch.randn(STEPS, ROWS, 123, device="cuda"))[0].sum().backward()
        assert [each.shape for each in gradients(without)] == [each.shape for each in without.parameters()]
    assert buffers[0] == buffers[1]
    assert gpu.report().allocated_peak_bytes


@pytest.mark.parametrize("batch_first", [False, True])
def test_packed_rows_keep_as_much_as_they_are_long(batch_first):
    lengths = [9, 5, 2]
    with VirtualGPU("a100-80gb") as gpu:
        layers = nn.LSTM(16, 32, bidirectional=True, batch_first=batch_first).cuda()
        rows = torch.randn(*((3, 9) if batch_first else (9, 3)), 16, device="cuda")
        packed, (states, cells) = layers(pack_padded_sequence(rows, lengths, batch_first=batch_first))
        assert packed.data.shape == (sum(lengths), 64)
        assert states.shape == cells.shape == (2, 3, 32)
        packed.data.sum().backward()
    assert gpu.trace().uncertain_bytes == sum(lengths) * 2 * 32 * 5 * 4


def test_a_projection_changes_outputs_and_states():
    with VirtualGPU("a100-80gb"):
        layers = nn.LSTM(16, 32, 2, proj_size=8).cuda()
        output, (states, cells) = layers(torch.randn(9, 3, 16, device="cuda"))
        assert (output.shape, states.shape, cells.shape) == ((9, 3, 8), (2, 3, 8), (2, 3, 32))
        output.sum().backward()
        assert [each.shape for each in gradients(layers)] == [each.shape for each in layers.parameters()]


@pytest.mark.parametrize("dtype, is_enabled", [(torch.bfloat16, True), (torch.float32, False)])
def test_without_cudnn_torchs_own_loop_runs(dtype, is_enabled):
    with VirtualGPU("a100-80gb") as gpu, torch.backends.cudnn.flags(enabled=is_enabled):
        layers = nn.GRU(16, 32, dtype=dtype).cuda()
        layers(torch.randn(9, 3, 16, device="cuda", dtype=dtype))[0].sum().backward()
    assert names(gpu).count("_thnn_fused_gru_cell") == 9


def test_backward_needs_training_mode_as_on_cuda():
    with VirtualGPU("a100-80gb"):
        layers = nn.GRU(16, 32).cuda().eval()
        output = layers(torch.randn(9, 3, 16, device="cuda"))[0]
        with pytest.raises(RuntimeError, match="cudnn RNN backward can only be called in training mode"):
            output.sum().backward()


def test_lengths_on_the_device_are_refused_as_on_cuda():
    with VirtualGPU("a100-80gb"):
        rows = torch.randn(9, 3, 16, device="cuda")
        with pytest.raises(
            RuntimeError, match="should be a 1D CPU int64 tensor, but got 1D cuda:0 Long tensor"
        ):
            pack_padded_sequence(rows, torch.tensor([9, 5, 2], device="cuda"))
