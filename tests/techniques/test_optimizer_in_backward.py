"""An optimizer fed by backward updates as it would after backward, with fewer gradients alive."""

from __future__ import annotations

import copy
import gc
import logging
import math
import weakref
from functools import partial

import pytest
import torch
from tiny_models import tiny_llama
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers import OPTIMIZERS, OptimizerConfig, create_optimizer
from lowmem_ft.techniques import optimizer_in_backward as module
from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation
from lowmem_ft.techniques.gradients.norm import clip_grad_norm
from lowmem_ft.techniques.loss.chunked_loss import LossConfig, enable_chunked_loss
from lowmem_ft.techniques.optimizer_in_backward import enable_optimizer_in_backward
from lowmem_ft.training.step.loss_scaling import LossScale

CPU = torch.device("cpu")
LEARNING_RATE = 1e-2
VOCAB = 61


tiny_model = partial(tiny_llama, vocab_size=VOCAB, intermediate_size=64, num_attention_heads=2)


def backward(model, seed=0, scale=1.0):
    ids_BT = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(seed))
    (model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss * scale).backward()


def optimizer_of(model, *, name="adamw", state="fp32", **fields):
    fields["state"] = state if OPTIMIZERS[name].takes_state_formats else "fp32"
    optimizer = create_optimizer(
        model,
        OptimizerConfig(**{"name": name, "weight_decay": 0.1, **fields}),
        learning_rate=LEARNING_RATE,
        seed=0,
    )
    optimizer.allocate_state()
    return optimizer


def weights(model):
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def stepped_after(model, optimizer, max_norm, num_steps=3):
    for step in range(num_steps):
        backward(model, step)
        clip_grad_norm(model.parameters(), math.inf if max_norm is None else max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def stepped_in_backward(model, optimizer, max_norm, num_steps=3, memory=None):
    with enable_optimizer_in_backward(
        optimizer, device=CPU, max_grad_norm=max_norm, memory=memory
    ) as in_backward:
        for step in range(num_steps):
            backward(model, step)
            in_backward.clip_grad_norm(lambda values: None)
            in_backward.update_weights(lambda: True)
    return weights(model)


def updates_of_a_step(monkeypatch, memory=None, **fields):
    """How many gradients each call of ``update`` gets, and how many parameters there are."""
    model = tiny_model()
    optimizer = optimizer_of(model, **fields)
    update, calls = optimizer.update, []

    def listening(slices, **options):
        calls.append(0)

        def counted():
            for finished in slices:
                calls[-1] += 1
                yield finished

        update(counted(), **options)

    monkeypatch.setattr(optimizer, "update", listening)
    stepped_in_backward(model, optimizer, 1.0, num_steps=1, memory=memory)
    assert calls.pop() == 0, "the step itself finds no gradient"
    return calls, len(optimizer.param_groups[0]["params"]) + len(optimizer.param_groups[1]["params"])


def test_one_update_applies_all_gradients_that_wait_on_the_device(monkeypatch):
    calls, num_parameters = updates_of_a_step(monkeypatch)
    assert calls == [num_parameters]


@pytest.mark.parametrize(
    "fields", [{"memory": HostMemory(CPU)}, {"name": "adafactor"}], ids=["host", "whole"]
)
def test_each_parameter_is_updated_alone_where_one_update_of_all_would_take_memory(monkeypatch, fields):
    calls, num_parameters = updates_of_a_step(monkeypatch, **fields)
    assert calls == [1] * num_parameters


def both_ways(max_norm, dtype=torch.float32, *, tied=False, memory=None, **fields):
    model = tiny_model(dtype, tie_word_embeddings=tied)
    other = copy.deepcopy(model)
    after = stepped_after(model, optimizer_of(model, **fields), max_norm)
    in_backward = stepped_in_backward(other, optimizer_of(other, **fields), max_norm, memory=memory)
    return in_backward, after


def is_equal(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


FORMATS = [
    (torch.float32, {}),
    (torch.float32, {"state": "8bit"}),
    (torch.bfloat16, {"master": "fp32"}),
    (torch.bfloat16, {"master": "split16", "state": "bf16"}),
    (torch.bfloat16, {"master": "split24", "state": "8bit"}),
    (torch.bfloat16, {"master": "stochastic_rounding"}),
]


@pytest.mark.parametrize("dtype,formats", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_weights_are_bitwise_those_of_steps_after_backward(name, dtype, formats):
    in_backward, after = both_ways(None, dtype, name=name, **formats)
    assert is_equal(in_backward, after)


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_gradients_that_wait_for_a_norm_below_the_limit_change_no_bit(name, on_host):
    memory = HostMemory(CPU) if on_host else None
    in_backward, after = both_ways(1e6, name=name, memory=memory, state="8bit")
    assert is_equal(in_backward, after)


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_clipping_is_that_of_torch(on_host):
    model = tiny_model()
    other = copy.deepcopy(model)
    in_backward = enable_optimizer_in_backward(
        optimizer_of(other, name="sgd", momentum=0.0, weight_decay=0.0),
        device=CPU,
        max_grad_norm=0.1,
        memory=HostMemory(CPU) if on_host else None,
    )
    backward(model)
    backward(other)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    ours = in_backward.clip_grad_norm(lambda values: None)
    in_backward.update_weights(lambda: True)
    assert norm > 1  # or nothing would be clipped
    torch.testing.assert_close(ours, norm, rtol=1e-6, atol=0)
    for (name, weight), parameter in zip(other.named_parameters(), model.parameters(), strict=True):
        expected = parameter - LEARNING_RATE * parameter.grad
        torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_every_parameter_is_updated_once_a_step(tied, max_norm):
    model = tiny_model(tie_word_embeddings=tied)
    enable_chunked_loss(model, LossConfig(chunk_tokens=5))
    optimizer = optimizer_of(model)
    stepped_in_backward(model, optimizer, max_norm, num_steps=1)
    assert {state["step"] for state in optimizer.state.values()} == {1}
    assert len(optimizer.state) == len(list(model.parameters()))


def test_a_tied_weight_gets_both_its_gradients():
    in_backward, after = both_ways(None, tied=True)
    assert is_equal(in_backward, after)


class Watched(torch.optim.SGD):
    """An optimizer that notes how many bytes of gradients are alive at each update."""

    slice_unit = 1

    def __init__(self, parameters):
        super().__init__(parameters, lr=1.0)
        self.alive = []
        self.updated = []

    def update(self, slices, *, scale=None, hyperparameters=None):
        for finished in slices:
            parameters = self.param_groups[0]["params"]
            waiting = [parameter.grad.nbytes for parameter in parameters if parameter.grad is not None]
            self.alive.append(finished.gradient.nbytes + sum(waiting))
            self.updated.append(finished.gradient)


def test_one_gradient_is_alive_at_a_time():
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    optimizer = Watched(layers.parameters())
    enable_optimizer_in_backward(optimizer, device=CPU, max_grad_norm=None)
    layers(torch.ones(2, 64)).sum().backward()
    assert optimizer.alive == [64 * 64 * 4] * 5


@pytest.mark.parametrize("on_host", [False, True], ids=["device", "host"])
def test_gradients_wait_in_the_types_of_their_weights(on_host):
    layer = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    optimizer, memory = Watched(layer.parameters()), HostMemory(CPU)
    in_backward = enable_optimizer_in_backward(
        optimizer, device=CPU, max_grad_norm=1.0, memory=memory if on_host else None
    )
    layer(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
    in_backward.clip_grad_norm(lambda values: None)
    in_backward.update_weights(lambda: True)
    (gradient,) = optimizer.updated
    assert gradient.dtype == torch.bfloat16
    assert memory.bytes_by_category.get("gradient", 0) == (64 * 64 * 2 if on_host else 0)


@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_gradients_come_back_from_the_host_a_few_at_a_time(name, monkeypatch):
    monkeypatch.setattr(module, "_ELEMENTS_AT_ONCE", 1024)
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    optimizer = optimizer_of(layers, name=name)
    optimizer.chunk_elements = 1024
    in_backward = enable_optimizer_in_backward(
        optimizer, device=CPU, max_grad_norm=1.0, memory=HostMemory(CPU)
    )
    layers(torch.ones(2, 64)).sum().backward()
    in_backward.clip_grad_norm(lambda values: None)
    with StorageTracker() as tracker:
        in_backward.update_weights(lambda: True)
    at_once = 64 * 64 if name == "adafactor" else 1024
    chunk = 1024
    # Two gradients on their way or in use, one read ahead, and the update's own temporaries.
    assert tracker.peak_bytes <= 4 * (3 * at_once + 6 * chunk)


def test_a_gradient_may_come_in_parts():
    model = nn.Linear(32, 32, bias=False)
    other = copy.deepcopy(model)
    gradient = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    for each, parts in ((model, 1), (other, 2)):
        in_backward = enable_optimizer_in_backward(
            optimizer_of(each, state="8bit"), device=CPU, max_grad_norm=0.5
        )
        for part, rows in enumerate(gradient.clone().chunk(parts)):
            in_backward.take(each.weight, rows, part * rows.numel())
        norm = in_backward.clip_grad_norm(lambda values: None)
        torch.testing.assert_close(norm, gradient.norm(), rtol=1e-6, atol=0)
        in_backward.update_weights(lambda: True)
    torch.testing.assert_close(other.weight, model.weight, rtol=1e-6, atol=1e-8)


def test_a_gradient_that_comes_twice_is_refused():
    model = nn.Linear(4, 4)
    enable_optimizer_in_backward(optimizer_of(model), device=CPU, max_grad_norm=1.0)
    x = torch.ones(2, 4, requires_grad=True)
    y = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UserError, match=r"came twice.*Set optimizer.in_backward=false"):
        y.sum().backward()


def test_what_is_not_finite_reaches_no_weight_and_no_state():
    model = tiny_model()
    optimizer = optimizer_of(model)
    in_backward = enable_optimizer_in_backward(optimizer, device=CPU, max_grad_norm=None)
    before = weights(model)
    model.model.layers[1].mlp.up_proj.weight.register_hook(
        lambda gradient: gradient.index_fill(0, torch.tensor([3]), math.nan)
    )
    backward(model)
    assert not torch.isfinite(in_backward.clip_grad_norm(lambda values: None))
    in_backward.update_weights(lambda: False)
    tensors = [
        *model.parameters(),
        *(value for state in optimizer.state.values() for value in state.values()),
    ]
    assert all(torch.isfinite(tensor).all() for tensor in tensors if isinstance(tensor, torch.Tensor))
    assert not torch.equal(model.lm_head.weight, before["lm_head.weight"])  # it came before
    moment = optimizer.state[model.model.layers[0].mlp.up_proj.weight]["exp_avg"]
    assert not moment.any()  # it came after


def test_a_step_that_is_not_finite_is_dropped_as_a_whole_where_gradients_wait():
    model = tiny_model()
    optimizer = optimizer_of(model)
    in_backward = enable_optimizer_in_backward(optimizer, device=CPU, max_grad_norm=1.0)
    before, state = weights(model), copy.deepcopy(dict(optimizer.state))
    hook = model.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
    backward(model)
    assert not torch.isfinite(in_backward.clip_grad_norm(lambda values: None))
    in_backward.update_weights(lambda: False)
    assert is_equal(weights(model), before)
    torch.testing.assert_close(list(optimizer.state.values()), list(state.values()), rtol=0, atol=0)
    hook.remove()
    other = copy.deepcopy(model)
    backward(model)
    assert torch.isfinite(in_backward.clip_grad_norm(lambda values: None))
    in_backward.update_weights(lambda: True)
    assert not is_equal(weights(model), before)
    fresh = stepped_in_backward(other, optimizer_of(other), 1.0, num_steps=1)
    assert is_equal(weights(model), fresh)  # nothing of the dropped step is left


def test_updates_that_are_put_off_are_made_with_the_numbers_of_their_own_step():
    model = tiny_model(torch.bfloat16)
    other = copy.deepcopy(model)
    now, later = optimizer_of(model), optimizer_of(other)
    first = enable_optimizer_in_backward(now, device=CPU, max_grad_norm=0.1)
    second = enable_optimizer_in_backward(later, device=CPU, max_grad_norm=0.1, memory=HostMemory(CPU))
    layer = list(other.model.layers[0].parameters())
    second.defer(layer)
    before = weights(other.model.layers[0])
    for each, in_backward in ((model, first), (other, second)):
        backward(each)
        in_backward.clip_grad_norm(lambda values: None)
        in_backward.update_weights(lambda: True)
    assert is_equal(weights(other.model.layers[0]), before)
    assert is_equal(weights(other.model.layers[1]), weights(model.model.layers[1]))
    for group in later.param_groups:
        group["lr"] = 123.0
    assert second.has_deferred(layer[:3])
    second.apply(layer[:3])
    assert not second.has_deferred(layer[:3])
    second.flush()
    assert not second.has_deferred(layer)
    assert is_equal(weights(other), weights(model))


def test_removing_makes_pending_updates_and_leaves_a_plain_optimizer():
    model = tiny_model()
    before = weights(model)
    optimizer = optimizer_of(model)
    handle = enable_optimizer_in_backward(optimizer, device=CPU, max_grad_norm=1.0)
    handle.defer(model.parameters())
    backward(model)
    handle.clip_grad_norm(lambda values: None)
    handle.update_weights(lambda: True)
    assert is_equal(weights(model), before)
    handle.remove()
    assert not is_equal(weights(model), before)
    changed = weights(model)
    backward(model)
    assert is_equal(weights(model), changed)
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.step()
    assert {state["step"] for state in optimizer.state.values()} == {2}


def test_model_and_optimizer_go_when_nobody_holds_them():
    model = tiny_model()
    optimizer = optimizer_of(model)
    enable_optimizer_in_backward(optimizer, device=CPU, max_grad_norm=1.0, memory=HostMemory(CPU))
    backward(model)
    watched = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.lm_head.weight)]
    del model, optimizer
    gc.collect()
    assert [watch() for watch in watched] == [None] * 3


def test_an_optimizer_is_all_that_has_to_be_kept():
    model = tiny_model()
    before = weights(model)
    optimizer = optimizer_of(model)
    enable_optimizer_in_backward(optimizer, device=CPU, max_grad_norm=None)
    gc.collect()
    backward(model)
    assert not any(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    del optimizer
    gc.collect()
    with pytest.raises(UserError, match=r"needs its optimizer as long as backward is called.*was deleted"):
        backward(model, seed=1)


@pytest.mark.parametrize("scale", [2.0**10, 2.0**-3])
def test_the_fp16_loss_scale_changes_no_number(scale):
    results = []
    for factor in (1.0, scale):
        scaler = torch.amp.GradScaler("cpu", init_scale=factor)
        model = tiny_model()
        in_backward = enable_optimizer_in_backward(optimizer_of(model), device=CPU, max_grad_norm=0.1)
        backward(model, scale=scaler.scale(torch.ones(())))
        norm = in_backward.clip_grad_norm(LossScale(scaler).unscale)
        in_backward.update_weights(lambda: True)
        scaler.update()
        results.append((norm, weights(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert is_equal(results[0][1], results[1][1])


def test_an_overflow_lowers_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    model = tiny_model()
    in_backward = enable_optimizer_in_backward(optimizer_of(model), device=CPU, max_grad_norm=1.0)
    backward(model, scale=scaler.scale(torch.ones(())))
    assert not torch.isfinite(in_backward.clip_grad_norm(LossScale(scaler).unscale))
    in_backward.update_weights(lambda: False)
    scaler.update()
    assert scaler.get_scale() == 2.0**126


def test_each_way_is_logged(caplog):
    caplog.set_level(logging.INFO)
    for max_norm, memory, text in (
        (None, None, "applied and freed"),
        (1.0, None, "kept in their weights' types"),
        (1.0, HostMemory(CPU), "are kept on the host"),
    ):
        model = tiny_model()
        with enable_optimizer_in_backward(
            optimizer_of(model), device=CPU, max_grad_norm=max_norm, memory=memory
        ):
            assert text in caplog.messages[-1]


def test_sums_in_float32_are_applied_unrounded_where_nothing_waits():
    model = tiny_model(torch.bfloat16)
    other = copy.deepcopy(model)
    now, later = optimizer_of(model), optimizer_of(other)
    enable_float32_accumulation(now, takes_float32=True)
    enable_float32_accumulation(later, takes_float32=True)
    in_backward = stepped_in_backward(other, later, None, num_steps=1)
    assert is_equal(in_backward, stepped_after(model, now, None, num_steps=1))


@pytest.fixture
def join_group():
    """Makes this process the first of two, of which the other does nothing; ends the group with the test."""

    def join():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    yield join
    gc.collect()  # a DDP model goes before the group that it holds
    torch.distributed.destroy_process_group()


def test_several_processes_are_refused(join_group):
    join_group()
    with pytest.raises(
        UserError,
        match=r"one process, or if .* got 2 processes with all weights each: .* Set optimizer.in_backward=false",
    ):
        enable_optimizer_in_backward(optimizer_of(tiny_model()), device=CPU, max_grad_norm=None)


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_model_that_is_made_data_parallel_later_is_refused_before_a_weight_changes(
    join_group, max_grad_norm
):
    model = tiny_model()
    before = weights(model)
    optimizer = optimizer_of(model)
    enable_optimizer_in_backward(optimizer, device=CPU, max_grad_norm=max_grad_norm)
    join_group()
    parallel = nn.parallel.DistributedDataParallel(model)
    with pytest.raises(UserError, match="got 2 processes with all weights each"):
        backward(parallel)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(model).items())
