"""MLPs that compute their last layer's input again keep less, and change no number."""

import gc
import logging
from functools import partial

import pytest
import torch
from measuring.families import FAMILIES
from tiny_models import loss_and_gradients, tiny_llama
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.accumulation.float32_accumulation import enable_float32_accumulation
from lowmem_ft.techniques.accumulation.fused_accumulation import enable_fused_accumulation
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.fused_adapter import enable_fused_adapters
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.checkpointing.recomputed_activation import enable_recomputed_activations

CPU = torch.device("cpu")
RECOMPUTE = CheckpointingConfig(mlp_activation="recompute")
LAYERS, ROWS, TOKENS = 3, 2, 16
TRAINS_ALL = ("llama", "gemma2", "qwen2", "gpt2", "phi3")


def model_of(family, dtype=torch.float32, **more):
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type=family, **{**FAMILIES[family], **more})
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


loss_and_gradients_of = partial(loss_and_gradients, ids=torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS))


def kept_bytes(model):
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
    with StorageTracker() as tracker:
        output = model(input_ids=ids, use_cache=False).logits
        kept = tracker.live_bytes
    output.sum().backward()
    return kept


def recompute(model, config=RECOMPUTE):
    return enable_recomputed_activations(model, config, device=CPU)


def same(ours, stock):
    return len(ours) == len(stock) and all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("family", TRAINS_ALL)
def test_gradients_are_bitwise_those_of_the_stock_model(family, autocast):
    model = model_of(family)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        stock = loss_and_gradients_of(model)
        with recompute(model):
            assert same(loss_and_gradients_of(model), stock)


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3"])
def test_each_layer_frees_the_input_of_its_last_linear_layer(family):
    model = model_of(family)
    before = kept_bytes(model)
    with recompute(model):
        during = kept_bytes(model)
    width = model.config.intermediate_size if family != "gpt2" else 4 * model.config.n_embd
    assert before - during == model.config.num_hidden_layers * ROWS * TOKENS * width * 4
    assert kept_bytes(model) == before


def test_a_backward_pass_leaves_nothing_behind():
    model = tiny_llama(num_hidden_layers=LAYERS)
    gc.disable()  # what only a collection would free is memory that a device runs out of
    try:
        with recompute(model), StorageTracker() as tracker:
            live = []
            for _ in range(3):
                loss_and_gradients_of(model)
                live.append(tracker.live_bytes)
    finally:
        gc.enable()
    assert live[0] == live[1] == live[2]


def test_checkpointed_layers_are_left_alone(caplog):
    caplog.set_level(logging.INFO)
    model = tiny_llama(num_hidden_layers=LAYERS)
    stock = loss_and_gradients_of(model)
    config = CheckpointingConfig(mode="full", skip_last_layers=1, mlp_activation="recompute")
    with enable_checkpointing(model, config):
        before = kept_bytes(model)
        with recompute(model, config):
            assert before - kept_bytes(model) == ROWS * TOKENS * model.config.intermediate_size * 4
            assert same(loss_and_gradients_of(model), stock)
    assert "1 in 1 of 3 layers" in caplog.text


def test_a_config_that_checkpoints_every_layer_is_told_that_none_is_left(caplog):
    model = tiny_llama(num_hidden_layers=LAYERS)
    recompute(model, CheckpointingConfig(mode="full", mlp_activation="recompute"))
    assert "every layer is checkpointed" in caplog.text


@pytest.mark.parametrize("kernel", ["fused", "peft"])
def test_adapters_save_a_recomputed_input_too(kernel):
    model = model_of("llama")
    config = AdapterConfig(name="lora", r=4, kernel=kernel, lora_dropout=0.25)
    enable_lora(model, config)
    enable_fused_adapters(model, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    stock, before = loss_and_gradients_of(model), kept_bytes(model)
    with recompute(model):
        assert same(loss_and_gradients_of(model), stock)
        freed = before - kept_bytes(model)
    one_each = LAYERS_OF_LLAMA * ROWS * TOKENS * model.config.intermediate_size * 4
    assert freed == (one_each if kernel == "fused" else 0)  # PEFT's saves what dropout has made of it


LAYERS_OF_LLAMA = FAMILIES["llama"]["num_hidden_layers"]


def test_sums_inside_the_product_take_a_recomputed_input():
    model = model_of("llama", torch.bfloat16)
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)

    def sums():
        model.zero_grad()
        for _ in range(2):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    enable_float32_accumulation(torch.optim.SGD(model.parameters()), takes_float32=True)
    enable_fused_accumulation(model, device=CPU)
    stock = sums()
    with recompute(model):
        assert same(sums(), stock)


def test_a_second_backward_pass_over_one_graph_computes_it_again():
    model = tiny_llama(num_hidden_layers=LAYERS)
    ids = torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
    with recompute(model):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        parameters = list(model.parameters())
        once = torch.autograd.grad(loss, parameters, retain_graph=True)
        again = torch.autograd.grad(loss, parameters)
    assert same(again, once)


class FailsOnce(nn.Module):
    """An activation function that runs out of memory when it is first called."""

    def __init__(self, function):
        super().__init__()
        self.function, self.has_failed = function, False

    def forward(self, x):
        if not self.has_failed:
            self.has_failed = True
            raise torch.OutOfMemoryError
        return self.function(x)


@pytest.mark.parametrize("layer", range(LAYERS))
def test_an_interrupted_forward_is_forgotten(layer):
    model = tiny_llama(num_hidden_layers=LAYERS)
    stock = loss_and_gradients_of(model)
    handle = recompute(model)
    mlp = model.model.layers[layer].mlp
    mlp.act_fn = FailsOnce(mlp.act_fn)
    with StorageTracker() as tracker:
        with pytest.raises(torch.OutOfMemoryError):
            loss_and_gradients_of(model)
        model.zero_grad()
        handle.abandon()
        assert tracker.live_bytes == 0
    assert same(loss_and_gradients_of(model), stock)


class WithResidual(nn.Module):
    """An MLP that computes with its own input, too."""

    def __init__(self, width):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)) + x)


class WithRelu(WithResidual):
    """An MLP whose activation function saves its output, which is the last layer's input."""

    def forward(self, x):
        return self.down_proj(torch.relu(self.up_proj(x)))


@pytest.mark.parametrize(
    "kind, why", [(WithResidual, "does not run with these alone"), (WithRelu, "nothing would be freed")]
)
def test_an_mlp_that_needs_more_is_refused_and_nothing_changes(kind, why):
    model = tiny_llama(num_hidden_layers=LAYERS)
    model.model.layers[1].mlp = kind(model.config.hidden_size)
    stock = loss_and_gradients_of(model)
    with pytest.raises(ModelError, match=f"{kind.__name__}.*{why}.*checkpointing.mlp_activation=keep"):
        recompute(model)
    assert same(loss_and_gradients_of(model), stock)
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


class WithDropout(WithResidual):
    """An MLP that draws random numbers in front of its last layer."""

    def forward(self, x):
        return self.down_proj(nn.functional.silu(nn.functional.dropout(self.up_proj(x), 0.5, self.training)))


class CalledTwice(WithResidual):
    """An MLP that calls its first layer twice."""

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.up_proj(x)) * torch.tanh(self.up_proj(self.up_proj(x))))


def with_a_hook(width):
    """Return an MLP whose last layer gets its input from a user's hook."""
    mlp = CalledOnce(width)
    mlp.down_proj.register_forward_pre_hook(lambda linear, inputs: (inputs[0] * 2,))
    return mlp


class CalledOnce(WithResidual):
    """An MLP as it should be."""

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.up_proj(x)))


@pytest.mark.parametrize("kind", [WithDropout, CalledTwice, with_a_hook])
def test_what_no_trial_without_values_shows_the_first_forward_refuses(kind):
    model = tiny_llama(num_hidden_layers=LAYERS)
    model.model.layers[1].mlp = kind(model.config.hidden_size)
    recompute(model.eval())
    with pytest.raises(ModelError, match=r"another when it is computed again.*mlp_activation=keep"):
        loss_and_gradients_of(model.train())


class Mixing(WithResidual):
    """An MLP whose activation has a product, which autocast computes in 16 bits."""

    def __init__(self, width):
        super().__init__(width)
        self.mix = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.up_proj(x)) @ self.mix)


@pytest.mark.parametrize("in_forward", [True, False])
@pytest.mark.parametrize("in_backward", [False, True])
def test_backward_computes_as_forward_did_with_and_without_autocast(in_forward, in_backward):
    model = tiny_llama(num_hidden_layers=LAYERS)
    model.model.layers[1].mlp = Mixing(model.config.hidden_size)
    ids = torch.arange(TOKENS)[None]

    def gradients():
        with torch.autocast("cpu", torch.bfloat16, enabled=in_forward):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        with torch.autocast("cpu", torch.bfloat16, enabled=in_backward):  # outside of it, as is usual, or not
            return torch.autograd.grad(loss, list(model.parameters()))

    stock = gradients()
    with recompute(model):
        assert same(gradients(), stock)


def test_experts_of_one_tensor_are_refused():
    with pytest.raises(ModelError, match=r"several linear layers.*checkpointing.mlp_activation=keep"):
        recompute(model_of("qwen3_moe"))


def test_a_frozen_last_layer_keeps_no_input_and_costs_nothing(caplog):
    model = tiny_llama(num_hidden_layers=LAYERS)
    for layer in model.model.layers[1:]:
        layer.mlp.down_proj.requires_grad_(False)
    stock, before = loss_and_gradients_of(model), kept_bytes(model)
    caplog.set_level(logging.INFO)
    with recompute(model):
        assert before - kept_bytes(model) == ROWS * TOKENS * model.config.intermediate_size * 4
        assert same(loss_and_gradients_of(model), stock)
    assert "MLPs: 1 in" in caplog.text


def test_inside_a_checkpoint_of_others_it_steps_back():
    model = tiny_llama(num_hidden_layers=LAYERS)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    stock, before = loss_and_gradients_of(model), kept_bytes(model)
    with recompute(model):
        assert kept_bytes(model) == before
        assert same(loss_and_gradients_of(model), stock)


def test_what_the_last_layer_saves_of_its_own_does_not_keep_the_graph():
    model = tiny_llama(num_hidden_layers=LAYERS)
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda linear, inputs, output: torch.tanh(output))
    ids = torch.arange(TOKENS)[None]
    with recompute(model), StorageTracker() as tracker:
        for _ in range(2):
            model(input_ids=ids, use_cache=False)
            gc.collect()
            assert tracker.live_bytes == 0
