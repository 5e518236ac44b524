"""Offloaded activations give the same gradients bit for bit, and the device holds two layer inputs at any depth."""

import logging
from functools import partial

import pytest
import torch
import transformers as hf
from tiny_models import tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.offload import activation_offload
from lowmem_ft.techniques.offload.activation_offload import enable_activation_offload
from lowmem_ft.techniques.offload.config import OffloadConfig
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

ROWS, TOKENS, HIDDEN = 2, 64, 128
INPUT_BYTES = ROWS * TOKENS * HIDDEN * 4
CPU = torch.device("cpu")


tiny_model = partial(tiny_llama, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=3)


def loss_and_gradients(model, rows=ROWS, tokens=TOKENS):
    model.zero_grad()
    torch.manual_seed(1)
    ids = torch.arange(rows * tokens).reshape(rows, tokens) % 64
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "activations, checkpointing",
    [("inputs", "full"), ("inputs", "selective"), ("all", "none"), ("all", "full")],
)
def test_gradients_are_bitwise_those_of_the_stock_model(activations, checkpointing, dropout):
    model, host = tiny_model(attention_dropout=dropout), HostMemory(CPU)
    stock = loss_and_gradients(model)
    with (
        enable_checkpointing(model, CheckpointingConfig(mode=checkpointing, skip_last_layers=1)),
        enable_activation_offload(model, OffloadConfig(activations=activations), host),
    ):
        for _ in range(2):  # the second time in buffers that are used again
            ours = loss_and_gradients(model)
            assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
        assert host.bytes_by_category["activation"] > 0


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_gpt2_whose_layers_take_more_by_position(checkpointing):
    torch.manual_seed(0)
    config = hf.GPT2Config(vocab_size=64, n_embd=HIDDEN, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    model, host = AutoModelForCausalLM.from_config(config).train(), HostMemory(CPU)
    stock = loss_and_gradients(model)
    activations = "all" if checkpointing == "none" else "inputs"
    with (
        enable_checkpointing(model, CheckpointingConfig(mode=checkpointing)),
        enable_activation_offload(model, OffloadConfig(activations=activations), host),
    ):
        ours = loss_and_gradients(model)
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


def test_exactly_the_inputs_of_checkpointed_layers_wait_and_their_buffers_are_kept():
    model, host = tiny_model(num_hidden_layers=4), HostMemory(CPU)
    with (
        enable_checkpointing(model, CheckpointingConfig(mode="full", skip_last_layers=1)),
        enable_activation_offload(model, OffloadConfig(activations="inputs"), host),
    ):
        for _ in range(3):
            loss_and_gradients(model)
            assert host.bytes_by_category["activation"] == 3 * INPUT_BYTES
        loss_and_gradients(model, tokens=TOKENS // 2)
        assert host.bytes_by_category["activation"] == 3 * INPUT_BYTES
        loss_and_gradients(model, tokens=TOKENS * 2)
        assert host.bytes_by_category["activation"] == 3 * INPUT_BYTES * 2, (
            "larger buffers replace the small ones"
        )
    assert host.bytes_by_category["activation"] == 0, "removed: the host's memory is free again"


def kept_on_gpu(layers, activations, checkpointing="full"):
    """Bytes on a virtual GPU: kept by forward, and the backward's peak over what it began with."""
    with VirtualGPU("a100-80gb") as gpu:
        with torch.device("meta"):
            model = tiny_model(num_hidden_layers=layers)
        model = gpu.place(model).train().requires_grad_(False)
        with (
            enable_checkpointing(model, CheckpointingConfig(mode=checkpointing)),
            enable_activation_offload(
                model, OffloadConfig(activations=activations), HostMemory(gpu.device, is_limited=False)
            ),
        ):
            ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device=gpu.device)
            model.model.embed_tokens.requires_grad_()
            before = gpu.recorder.live_bytes
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            kept = gpu.recorder.live_bytes - before
            gpu.recorder.reset_peak()
            loss.backward()
            return kept, gpu.recorder.peak_bytes - before, gpu.report()


def test_the_device_keeps_one_layer_input_whatever_the_depth():
    plain = {layers: kept_on_gpu(layers, "none")[0] for layers in (4, 12)}
    ours = {layers: kept_on_gpu(layers, "inputs")[0] for layers in (4, 12)}
    assert plain[12] - plain[4] == 8 * INPUT_BYTES
    assert ours[12] == ours[4] == plain[4] - 3 * INPUT_BYTES


def test_backward_holds_one_more_on_its_way_whatever_the_depth():
    peaks = {layers: kept_on_gpu(layers, "inputs")[1] for layers in (4, 12)}
    assert peaks[12] == peaks[4]
    assert kept_on_gpu(12, "none")[1] - peaks[12] >= 9 * INPUT_BYTES


def test_host_memory_is_pinned_and_copies_are_counted():
    _, _, report = kept_on_gpu(12, "inputs")
    assert report.host_pinned_bytes == 12 * INPUT_BYTES


def test_all_leaves_only_what_is_small_or_on_its_way():
    plain = {layers: kept_on_gpu(layers, "none", "none")[0] for layers in (4, 12)}
    ours = {layers: kept_on_gpu(layers, "all", "none")[0] for layers in (4, 12)}
    a_layer_keeps = (plain[12] - plain[4]) / 8
    small_things_of_a_layer = (ours[12] - ours[4]) / 8
    assert a_layer_keeps > 10 * INPUT_BYTES
    assert small_things_of_a_layer < 0.05 * a_layer_keeps


def test_a_tensor_saved_twice_waits_once_and_weights_stay(monkeypatch):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN))

        def forward(self, x):
            return (torch.sin(x) * torch.cos(x) + x @ self.weight).sum()

    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED_BYTES", 1)
    model, host = Twice(), HostMemory(CPU)
    x = torch.randn(HIDDEN, HIDDEN, requires_grad=True)
    with enable_activation_offload(model, OffloadConfig(activations="all"), host):
        loss = model(x)
        # x three times; sin(x) and cos(x) for the product
        assert host.bytes_by_category["activation"] == 3 * x.nbytes
        loss.backward()
    expected = torch.autograd.grad((torch.sin(x) * torch.cos(x) + x @ model.weight).sum(), x)[0]
    assert torch.equal(x.grad, expected)


def test_strides_survive_and_tensors_with_gaps_or_overlaps_stay(monkeypatch):
    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return tensors[0].sum()

        @staticmethod
        def backward(ctx, gradient):
            seen.extend(ctx.saved_tensors)
            return (None,) * len(seen)

    class Model(nn.Module):
        def forward(self, *tensors):
            return Keep.apply(*tensors)

    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED_BYTES", 1)
    monkeypatch.setattr(activation_offload, "_ON_THEIR_WAY", {"all": 1})
    seen = []
    x = torch.randn(6, 4, 5, requires_grad=True)
    tensors = x.transpose(0, 2), x[:, ::2], x.new_ones(3).expand(7, 3), torch.randn(9)
    model = Model()
    with enable_activation_offload(model, OffloadConfig(activations="all"), HostMemory(CPU)):
        model(*tensors).backward()
    for ours, theirs in zip(seen, tensors, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()
    moved = [ours.data_ptr() != theirs.data_ptr() for ours, theirs in zip(seen, tensors, strict=True)]
    assert moved == [True, False, False, False], "the last one saved had not left yet"


def test_memory_written_to_between_two_uses_is_two_tensors(monkeypatch):
    class Model(nn.Module):
        def forward(self, x):
            memory = (x * 2).detach()
            first = Keep.apply(x, memory)
            another = Keep.apply(x, torch.zeros_like(x))  # the first has left by now
            memory.mul_(10)
            return first + another + Keep.apply(x, memory)

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, memory):
            ctx.save_for_backward(memory)
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            return ctx.saved_tensors[0] * gradient, None

    monkeypatch.setattr(activation_offload, "SMALLEST_OFFLOADED_BYTES", 1)
    monkeypatch.setattr(activation_offload, "_ON_THEIR_WAY", {"all": 1})
    model = Model()
    x = torch.randn(256, requires_grad=True)
    with enable_activation_offload(model, OffloadConfig(activations="all"), HostMemory(CPU)):
        model(x).backward()
    torch.testing.assert_close(x.grad, 2 * x.detach() + 20 * x.detach())


def test_a_graph_that_is_dropped_gives_its_buffers_back():
    model, host = tiny_model(), HostMemory(CPU)
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS) % 64
    with (
        enable_checkpointing(model, CheckpointingConfig(mode="full")),
        enable_activation_offload(model, OffloadConfig(activations="inputs"), host),
    ):
        for _ in range(3):
            model(input_ids=ids, labels=ids, use_cache=False)
        # The last one saved of a forward pass is let go by the next.
        assert host.bytes_by_category["activation"] <= 4 * INPUT_BYTES


def test_evaluation_copies_nothing():
    model, host = tiny_model().eval(), HostMemory(CPU)
    with (
        enable_checkpointing(model, CheckpointingConfig(mode="full")),
        enable_activation_offload(model, OffloadConfig(activations="inputs"), host),
        torch.no_grad(),
    ):
        model(torch.zeros(1, 8, dtype=torch.int64))
    assert host.bytes_by_category == {}


def test_inputs_without_checkpointing_are_refused():
    with pytest.raises(ModelError, match=r"needs checkpointed layers.*Set checkpointing.mode=full"):
        enable_activation_offload(tiny_model(), OffloadConfig(activations="inputs"), HostMemory(CPU))


def test_layers_called_by_keyword_are_refused():
    model = tiny_model()
    with (
        enable_checkpointing(model, CheckpointingConfig(mode="full")),
        enable_activation_offload(model, OffloadConfig(activations="inputs"), HostMemory(CPU)),
        pytest.raises(ModelError, match="called with their hidden states first, by position"),
    ):
        model.model.layers[0](hidden_states=torch.zeros(1, 2, HIDDEN))


def test_all_warns_of_its_cost(caplog):
    with caplog.at_level(logging.WARNING):
        enable_activation_offload(tiny_model(), OffloadConfig(activations="all"), HostMemory(CPU))
    assert "takes longer than computing it again: checkpointing.mode=full" in caplog.text
