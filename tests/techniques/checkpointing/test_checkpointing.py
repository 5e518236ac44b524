"""Checkpointing changes what is kept for backward, and no number."""

import copy
import logging
from functools import partial

import pytest
import torch
import transformers as hf
from tiny_models import loss_and_gradients, tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import AutoModelForCausalLM

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.checkpointing import recomputed_layer
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.checkpointing.recomputed_layer import RecomputedLayer
from lowmem_ft.techniques.checkpointing.selective_checkpointing import KeepAttentionOutputs
from lowmem_ft.techniques.modules.autocast_state import AutocastState

LAYERS, ROWS, TOKENS, HIDDEN = 5, 2, 16, 32
HEADS = 4
LAYER_INPUT_BYTES = ROWS * TOKENS * HIDDEN * 4


tiny_model = partial(tiny_llama, num_hidden_layers=LAYERS)


def checkpointed_layers(model):
    return [index for index, layer in enumerate(model.model.layers) if layer.gradient_checkpointing]


loss_and_gradients_of = partial(loss_and_gradients, ids=torch.arange(ROWS * TOKENS).reshape(ROWS, TOKENS))


def kept_bytes(model):
    hidden = torch.zeros(ROWS, TOKENS, HIDDEN, requires_grad=True)
    with StorageTracker() as tracker:
        output = model.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        kept = tracker.live_bytes
    output.sum().backward()
    return kept


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("options", [{}, {"every_n_layers": 2}, {"skip_last_layers": 2}])
def test_gradients_are_bitwise_those_of_the_stock_model(mode, dropout, options):
    model = tiny_model(attention_dropout=dropout)
    stock = loss_and_gradients_of(model)
    with enable_checkpointing(model, CheckpointingConfig(mode=mode, **options)):
        ours = loss_and_gradients_of(model)
    assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))


def test_dropout_is_drawn_at_all():
    assert not torch.equal(
        loss_and_gradients_of(tiny_model(attention_dropout=0.3))[0],
        loss_and_gradients_of(tiny_model(attention_dropout=0.0))[0],
    )


class Draws(torch.nn.Module):
    """It drops numbers, and none of its attributes says so."""

    def __init__(self, share):
        super().__init__()
        self.share = share

    def forward(self, x):
        return torch.nn.functional.dropout(x, self.share)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_random_numbers_that_no_attribute_tells_are_seen_in_the_first_forward(share, monkeypatch):
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, Draws(share))
    stock = loss_and_gradients_of(model)
    kept = []
    monkeypatch.setattr(
        recomputed_layer, "AutocastState", lambda device: kept.append(1) or AutocastState(device)
    )
    with enable_checkpointing(model, CheckpointingConfig(mode="full")):
        for expected in (LAYERS, 2 * LAYERS if share else LAYERS):
            ours = loss_and_gradients_of(model)
            assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
            assert len(kept) == expected


def test_dropout_that_is_set_later_is_drawn_again():
    model = tiny_model()
    with enable_checkpointing(model, CheckpointingConfig(mode="full")):
        loss_and_gradients_of(model)
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.3
        ours, copied = loss_and_gradients_of(model), loss_and_gradients_of(copy.deepcopy(model))
    stock = loss_and_gradients_of(tiny_model(attention_dropout=0.3))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(stock, ours, copied, strict=True))


def of_torch(layer, *args):
    return checkpoint(layer, *args, use_reentrant=False)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_recomputed_layer_does_what_torchs_checkpoint_does(dtype, dropout):
    """Under autocast, twice over one graph, with a number that is no tensor, nested, and random numbers after it."""
    found = []
    for of_ours in (False, True):
        torch.manual_seed(0)
        inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Dropout(dropout))
        outer = torch.nn.Sequential(torch.nn.Linear(4, 4), inner, torch.nn.Linear(4, 4))
        again = RecomputedLayer(outer) if of_ours else of_torch
        within = partial(RecomputedLayer(inner) if of_ours else of_torch, inner)
        function = partial(
            again, lambda x, factor, within=within, outer=outer: outer[2](within(outer[0](x))) * factor
        )
        x = torch.randn(3, 4, requires_grad=True)
        for _ in range(2):
            with torch.autocast("cpu", dtype, enabled=dtype is not None):
                result = function(x, 3.0)
            result.sum().backward(retain_graph=True)
            result.sum().backward()
        found.append([result.detach(), x.grad, *(one.grad for one in outer.parameters()), torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("shape", [(4,), (1, 3)], ids=["no-tensor", "another-shape"])
def test_a_forward_that_does_something_else_the_second_time_is_refused(shape):
    calls = []

    def forward(x):
        calls.append(x)
        if len(calls) == 1:
            return (x.exp() + x.sigmoid()) * x
        return x.exp().reshape(shape).sum() if shape == (1, 3) else x + 1

    x = torch.ones(3, requires_grad=True) if shape == (1, 3) else torch.ones(4, requires_grad=True)
    result = RecomputedLayer(torch.nn.Identity())(forward, x)
    with pytest.raises(CheckpointError, match="its forward must do the same both times"):
        result.sum().backward()


def test_each_checkpointed_layer_frees_the_same_exact_number_of_bytes():
    model = tiny_model()
    kept = {0: kept_bytes(model)}
    for chosen in range(1, LAYERS + 1):
        config = CheckpointingConfig(mode="full", skip_last_layers=LAYERS - chosen)
        with enable_checkpointing(model, config):
            kept[chosen] = kept_bytes(model)
    first, *others = (kept[chosen - 1] - kept[chosen] for chosen in range(1, LAYERS + 1))
    position_ids = TOKENS * 8  # the recomputation needs them; layers share them, so only the first pays
    assert set(others) == {first + position_ids}
    assert first > 10 * LAYER_INPUT_BYTES


def test_a_checkpointed_layer_keeps_its_input_alone():
    shallow, deep = tiny_model(), tiny_model()
    shallow.model.layers = shallow.model.layers[:2]
    kept = []
    for model in (shallow, deep):
        with enable_checkpointing(model, CheckpointingConfig(mode="full")):
            kept.append(kept_bytes(model))
    rng_state = torch.get_rng_state().nbytes
    assert (kept[1] - kept[0]) / (LAYERS - 2) in (LAYER_INPUT_BYTES, LAYER_INPUT_BYTES + rng_state)


class AttentionCounter(TorchDispatchMode):
    """How often a fused attention kernel runs forward."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "attention" in func.name() and "backward" not in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "mode, options, expected",
    [
        ("none", {}, LAYERS),
        ("full", {}, 2 * LAYERS),
        ("selective", {}, LAYERS),
        ("selective", {"every_n_layers": 2, "skip_last_layers": 1}, LAYERS),
    ],
)
def test_selective_runs_attention_once(mode, options, expected):
    model = tiny_model()
    with (
        enable_checkpointing(model, CheckpointingConfig(mode=mode, **options)),
        AttentionCounter() as counter,
    ):
        loss_and_gradients_of(model)
    assert counter.count == expected


def test_a_selective_layer_keeps_its_input_and_what_attention_put_out():
    kept = {}
    for mode in ("full", "selective"):
        shallow, deep = tiny_model(), tiny_model()
        shallow.model.layers = shallow.model.layers[:2]
        for model in (shallow, deep):
            with enable_checkpointing(model, CheckpointingConfig(mode=mode)):
                kept[mode, len(model.model.layers)] = kept_bytes(model)
    by_layer = {mode: (kept[mode, LAYERS] - kept[mode, 2]) / (LAYERS - 2) for mode in ("full", "selective")}
    output_and_logsumexp = LAYER_INPUT_BYTES + ROWS * TOKENS * HEADS * 4
    assert by_layer["selective"] - by_layer["full"] == output_and_logsumexp


def test_dropout_behind_skipped_attention_draws_the_same_numbers(caplog):
    config = hf.GPT2Config(vocab_size=64, n_embd=HIDDEN, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    for attention_dropout in (0.0, 0.3):
        config.attn_pdrop = attention_dropout
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).train()
        stock = loss_and_gradients_of(model)
        with enable_checkpointing(model, CheckpointingConfig(mode="selective")):
            caplog.clear()
            ours = loss_and_gradients_of(model)
        assert all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))
        assert ("keeps nothing of some layers" in caplog.text) == (attention_dropout > 0)


@torch.library.custom_op("tests::dropping_attention", mutates_args=())
def dropping_attention(query: torch.Tensor, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """As flash-attn's operator: it draws its own dropout, and puts out what backward needs of it."""
    mask = (torch.rand_like(query) >= dropout_p).to(query.dtype) if dropout_p else torch.ones_like(query)
    return query * mask, mask


dropping_attention.register_autograd(
    lambda ctx, d_output, d_mask: (d_output * ctx.saved_tensors[0], None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_fused_operator_that_draws_dropout_is_computed_again(dropout):
    class Attention(torch.nn.Module):
        def forward(self, x):
            return torch.nn.functional.dropout(dropping_attention(x.sin(), dropout)[0], 0.5).exp()

    x = torch.randn(64, requires_grad=True)
    gradients, calls = [], []
    for run in (lambda f, x: f(x), KeepAttentionOutputs()):
        torch.manual_seed(1)
        with AttentionCounter() as counter:
            gradients += torch.autograd.grad(run(Attention(), x).sum(), x)
        calls.append(counter.count)
    assert torch.equal(*gradients)
    assert calls == ([1, 2] if dropout else [1, 1])


@pytest.mark.parametrize("implementation", ["eager", "flex_attention"])
def test_selective_with_unfused_attention_is_refused(implementation):
    model = tiny_model()
    model.config._attn_implementation = implementation
    with pytest.raises(
        UserError, match=rf"one fused operator .*, got {implementation}.*checkpointing.mode=full"
    ):
        enable_checkpointing(model, CheckpointingConfig(mode="selective"))
    assert checkpointed_layers(model) == []


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"every_n_layers": 2}, [0, 2, 4]),
        ({"skip_last_layers": 2}, [0, 1, 2]),
        ({"every_n_layers": 2, "skip_last_layers": 1}, [0, 2]),
        ({"every_n_layers": 9}, [0]),
    ],
)
def test_which_layers(options, expected, caplog):
    model = tiny_model()
    with (
        caplog.at_level(logging.INFO),
        enable_checkpointing(model, CheckpointingConfig(mode="full", **options)),
    ):
        assert checkpointed_layers(model) == expected
    assert f"{len(expected)} of {LAYERS} layers recompute" in caplog.text


def test_the_config_wins_over_what_was_enabled_before_and_remove_brings_it_back():
    model = tiny_model()
    for index, layer in enumerate(model.model.layers):
        layer.gradient_checkpointing = index == 4
    before = [dict(vars(layer)) for layer in model.model.layers]
    handle = enable_checkpointing(model, CheckpointingConfig(mode="full", skip_last_layers=3))
    assert checkpointed_layers(model) == [0, 1]
    assert model.config.use_cache is True  # a checkpoint saved meanwhile carries the config
    handle.remove()
    assert [dict(vars(layer)) for layer in model.model.layers] == before
    assert model.config.use_cache is True


def test_bad_values_explain_themselves_all_at_once():
    config = CheckpointingConfig(mode="full", every_n_layers=0, skip_last_layers=LAYERS)
    with pytest.raises(UserError) as error:
        enable_checkpointing(tiny_model(), config)
    assert len(error.value.problems) == 2
    assert "checkpointing.every_n_layers must be at least 1, got 0." in str(error.value)
    assert "checkpointing.skip_last_layers must be from 0 to 4 with a model of 5 layers, got 5." in str(
        error.value
    )


def test_model_without_decoder_layers_is_named():
    model = AutoModelForCausalLM.from_config(
        hf.CTRLConfig(vocab_size=64, n_embd=16, n_layer=1, n_head=2, dff=16, n_positions=16)
    )
    with pytest.raises(ModelError, match=r"CTRLLMHeadModel does not have them. .*checkpointing.mode=none"):
        enable_checkpointing(model, CheckpointingConfig(mode="full"))
