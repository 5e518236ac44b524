"""Updates made beside the next forward pass are those made in the step, and come before a layer's own."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from tiny_models import tiny_llama

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.optimizers import OptimizerConfig, create_optimizer
from lowmem_ft.techniques.offload.optimizer_offload import enable_optimizer_offload
from lowmem_ft.techniques.optimizer_in_backward import enable_optimizer_in_backward
from lowmem_ft.techniques.technique import Techniques
from lowmem_ft.techniques.update_overlap import enable_update_overlap

CPU = torch.device("cpu")
VOCAB = 61

tiny_model = partial(
    tiny_llama, torch.bfloat16, vocab_size=VOCAB, intermediate_size=64, num_attention_heads=2
)


def techniques_on(model, *, overlaps=True, memory="host", max_grad_norm=0.5):
    optimizer = create_optimizer(
        model, OptimizerConfig(state="8bit", master="split24"), learning_rate=1e-2, seed=0
    )
    on_host = enable_optimizer_offload(optimizer, HostMemory(CPU))
    optimizer.allocate_state()
    in_backward = enable_optimizer_in_backward(
        optimizer,
        device=CPU,
        max_grad_norm=max_grad_norm,
        memory=HostMemory(CPU) if memory == "host" else None,
    )
    on = Techniques(on_host, in_backward)
    if overlaps:
        on.add(enable_update_overlap(model, in_backward))
    return on


def backward(model, seed):
    ids_BT = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))
    model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()


def step(model, on, seed, *, finite=True):
    backward(model, seed)
    norm = on.clip_grad_norm(lambda values: None)
    on.update_weights(lambda: finite)
    return norm


def weights(module):
    return {name: weight.clone() for name, weight in module.state_dict().items()}


def is_equal(here, there):
    return here.keys() == there.keys() and all(here[name].equal(there[name]) for name in here)


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_the_updates_are_those_of_the_step_bit_for_bit(tied):
    model = tiny_model(tie_word_embeddings=tied)
    other = copy.deepcopy(model)
    ahead, now = techniques_on(model), techniques_on(other, overlaps=False)
    for seed in range(4):
        assert step(model, ahead, seed).equal(step(other, now, seed))
    ahead.flush()
    assert is_equal(weights(model), weights(other))


def test_each_layer_is_updated_before_its_own_forward_and_the_head_after_the_last():
    model = tiny_model(num_hidden_layers=3)
    on = techniques_on(model)
    before = weights(model)
    step(model, on, 0)
    layers = model.model.layers

    def changed():
        now = weights(model)
        return [
            any(not now[key].equal(before[key]) for key in before if key.startswith(name))
            for name in ("model.embed_tokens", *(f"model.layers.{number}." for number in range(3)), "lm_head")
        ]

    seen = [changed()]
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(changed()))
    model.lm_head.register_forward_pre_hook(lambda *_: seen.append(changed()))
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 4, dtype=torch.long))
    assert seen == [
        [True, False, False, False, False],
        [True, True, False, False, False],
        [True, True, True, False, False],
        [True, True, True, True, False],
        [True, True, True, True, True],
    ]


def test_a_dropped_step_leaves_nothing_to_be_made_later():
    model = tiny_model()
    on = techniques_on(model)
    before = weights(model)
    step(model, on, 0, finite=False)
    on.flush()
    assert is_equal(weights(model), before)


def test_removing_it_makes_the_updates_and_lets_later_ones_be_made_in_the_step():
    model = tiny_model()
    other = copy.deepcopy(model)
    ahead, now = techniques_on(model), techniques_on(other, overlaps=False)
    *_, overlap = ahead
    step(model, ahead, 0)
    step(other, now, 0)
    assert not is_equal(weights(model), weights(other))
    overlap.remove()
    assert is_equal(weights(model), weights(other))
    step(model, ahead, 1)
    step(other, now, 1)
    assert is_equal(weights(model), weights(other))


def test_weights_that_several_modules_have_are_updated_in_the_step():
    model = tiny_model()
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    on = techniques_on(model)
    before = weights(first)
    step(model, on, 0)
    after = weights(first)
    assert [name for name in before if not after[name].equal(before[name])] == ["mlp.up_proj.weight"]


@pytest.mark.parametrize("changes", [{"memory": "device"}, {"max_grad_norm": None}], ids=str)
def test_gradients_that_do_not_wait_on_the_host_are_refused(changes):
    with pytest.raises(UserError, match=r"Give enable_optimizer_in_backward a max_grad_norm and a memory"):
        techniques_on(tiny_model(), **changes)
