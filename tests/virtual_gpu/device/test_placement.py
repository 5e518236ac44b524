"""A model on meta gets a storage for each of its tensors, and stays the same model."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(8))


def test_tied_weights_stay_tied_and_count_once():
    with torch.device("meta"):
        model = Tied()
    with VirtualGPU("t4") as gpu:
        gpu.place(model)
        assert model.head.weight is model.embed.weight
        assert gpu.recorder.live_bytes == 32 * 16 * 4 + 8 * 4
    assert gpu.report().model.parameters == 32 * 16


def test_shapes_types_strides_and_gradients_are_kept():
    with torch.device("meta"):
        model = nn.Linear(4, 8, dtype=torch.bfloat16)
        model.weight = nn.Parameter(torch.empty(4, 8, dtype=torch.bfloat16).t(), requires_grad=False)
    model.weight.note = "mine"
    with VirtualGPU("t4") as gpu:
        weight = gpu.place(model).weight
        assert weight.device == gpu.device
        assert (weight.shape, weight.stride(), weight.dtype) == ((8, 4), (1, 8), torch.bfloat16)
        assert not weight.requires_grad
        assert model.bias.requires_grad
        assert weight.note == "mine"


def test_placing_again_changes_nothing():
    with torch.device("meta"):
        model = nn.Linear(4, 8)
    with VirtualGPU("t4") as gpu:
        weight = gpu.place(model).weight
        before = gpu.recorder.live_bytes
        assert gpu.place(model).weight is weight
        assert model.to("cuda").weight is weight
        assert gpu.recorder.live_bytes == before


def test_a_part_that_comes_later_is_placed_beside_what_is_there():
    with TracingMachine() as machine:
        model = nn.Sequential(nn.Linear(4, 4, device="meta"))
        first = machine.place(model)[0].weight
        model.append(nn.Linear(4, 4, device="meta"))
        machine.place(model)
        assert model[0].weight is first
        assert machine.recorder.live_bytes == 2 * (16 + 4) * 4


def test_quantised_layers_do_not_get_the_tensors_of_others():
    """Originals that go while a model is placed leave their addresses to new tensors, which are looked up as well."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    with torch.device("meta"):
        layers = [
            bitsandbytes.nn.Linear4bit(64, 64 + 64 * (number % 3), quant_type="nf4") for number in range(300)
        ]
    with VirtualGPU("t4") as gpu:
        gpu.place(nn.Sequential(*layers))
        for layer in layers:
            assert layer.weight.numel() == 64 * layer.out_features // 2
            assert layer.bias.shape == (layer.out_features,)
