"""What is put on an object comes off again, in whatever order."""

import functools
import gc
import itertools
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.techniques.accumulation.vertical_accumulation import enable_vertical_accumulation
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.loss.chunked_loss import enable_chunked_loss
from lowmem_ft.techniques.loss.config import LossConfig
from lowmem_ft.techniques.modules.patching import call_around, set_attribute, wrap_method
from lowmem_ft.techniques.offload.activation_offload import enable_activation_offload
from lowmem_ft.techniques.offload.config import OffloadConfig
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp


class Doubling:
    def forward(self, x):
        return 2 * x


def adding(number):
    return lambda hidden: lambda x: hidden(x) + number


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
@pytest.mark.parametrize("is_own", [False, True], ids=["of its class", "its own"])
def test_wrappers_come_off_in_any_order(order, is_own):
    target = Doubling()
    if is_own:
        target.forward = lambda x: 2 * x
    before = dict(vars(target))
    numbers = [1, 10, 100]
    undo = [wrap_method(target, "forward", adding(number)) for number in numbers]
    assert target.forward(1) == 113
    for index in order:
        undo[index]()
        numbers[index] = 0
        assert target.forward(1) == 2 + sum(numbers)
    assert vars(target) == before


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_attributes_come_back_in_any_order(order):
    target = nn.Linear(2, 2)
    before = dict(vars(target))
    undo = [set_attribute(target, "in_features", value) for value in (3, 4, 5)]
    values = [2, 3, 4, 5]
    for index in order:
        undo[index]()
        values.remove(index + 3)
        assert target.in_features == values[-1]
    assert vars(target) == before


def calling(held, hidden):
    return lambda x: (held, hidden(x))


def calling_at_once(held, hidden, x):
    return held, hidden(x)


@pytest.mark.parametrize("put_on, wrapper", [(wrap_method, calling), (call_around, calling_at_once)])
def test_nothing_of_a_wrapper_waits_for_the_garbage_collector(put_on, wrapper):
    target, held = Doubling(), Handle()
    reference = weakref.ref(held)
    gc.disable()
    try:
        undo = put_on(target, "forward", functools.partial(wrapper, held))
        assert target.forward(3) == (held, 6)
        del held
        undo()
        del undo
        assert reference() is None
    finally:
        gc.enable()


TECHNIQUES = {
    "tiled MLP": lambda model: enable_tiled_mlp(model, TilingConfig(mlp=3)),
    "checkpointing": lambda model: enable_checkpointing(model, CheckpointingConfig(mode="full")),
    "inputs away": lambda model: enable_activation_offload(
        model, OffloadConfig(activations="inputs"), HostMemory(torch.device("cpu"))
    ),
    "activations away": lambda model: enable_activation_offload(
        model, OffloadConfig(activations="all"), HostMemory(torch.device("cpu"))
    ),
    "vertical": lambda model: enable_vertical_accumulation(model, 1),
    "chunked loss": lambda model: enable_chunked_loss(model, LossConfig(chunk_tokens=8)),
}


def loss_and_gradients(model):
    model.zero_grad()
    ids = torch.arange(2 * 16).reshape(2, 16) + 3
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


def attributes(model):
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("pulled", TECHNIQUES)
def test_one_technique_is_pulled_out_from_among_the_others(pulled):
    """And then they follow from the first to the last, until the plain model is left."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config).train()
    plain, before = loss_and_gradients(model), attributes(model)
    handles = {name: enable(model) for name, enable in TECHNIQUES.items()}
    for name in [pulled, *(name for name in TECHNIQUES if name != pulled)]:
        handles[name].remove()
        for ours, theirs in zip(loss_and_gradients(model), plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert all(map(torch.equal, loss_and_gradients(model), plain))
    assert attributes(model) == before
    assert model(input_ids=torch.ones(1, 4, dtype=torch.int64), labels=None).logits is not None
