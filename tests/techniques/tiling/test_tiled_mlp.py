"""Tiled MLPs give the stock model's gradients, each once, and hold the inner activations of one tile."""

import copy
import gc

import pytest
import torch
import transformers as hf
from tiny_models import FAMILY_SIZES, model_of
from torch import nn
from transformers import AutoModelForCausalLM

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.techniques.tiling.tiled_mlp import enable_tiled_mlp

VOCABULARY, HIDDEN = FAMILY_SIZES["vocab_size"], FAMILY_SIZES["hidden_size"]
INTERMEDIATE, LAYERS = FAMILY_SIZES["intermediate_size"], FAMILY_SIZES["num_hidden_layers"]
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_experts": 4}

CONFIGS = {
    "llama": hf.LlamaConfig(**FAMILY_SIZES),
    "llama_with_biases": hf.LlamaConfig(**FAMILY_SIZES, mlp_bias=True),
    "qwen2": hf.Qwen2Config(**FAMILY_SIZES),
    "qwen3": hf.Qwen3Config(**FAMILY_SIZES, head_dim=8),
    "mistral": hf.MistralConfig(**FAMILY_SIZES),
    "gemma2": hf.Gemma2Config(**FAMILY_SIZES, head_dim=8),
    "gemma3": hf.Gemma3TextConfig(**FAMILY_SIZES, head_dim=8),
    "phi": hf.PhiConfig(**FAMILY_SIZES),
    "phi3": hf.Phi3Config(**FAMILY_SIZES),
    "gpt2": hf.GPT2Config(**GPT2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "falcon": hf.FalconConfig(  # adds to the MLP's output in place
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        parallel_attn=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    ),
    "mixtral": hf.MixtralConfig(**FAMILY_SIZES, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": hf.Qwen3MoeConfig(**FAMILY_SIZES, **MOE, head_dim=8),
}


def tiny_model(name="llama", dtype=torch.float32):
    return model_of(CONFIGS[name]).to(dtype)


def run(model, rows=3, tokens=11):
    """Loss, gradients, and how often the hooks on each parameter fired."""
    model.zero_grad()
    fired = dict.fromkeys((name for name, p in model.named_parameters() if p.requires_grad), 0)

    def count(name):
        def hook(parameter):
            fired[name] += 1

        return hook

    hooks = [
        parameter.register_post_accumulate_grad_hook(count(name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    torch.manual_seed(1)
    ids = torch.arange(rows * tokens).reshape(rows, tokens) + 3
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    for hook in hooks:
        hook.remove()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    return loss.detach(), gradients, fired


def furthest(ours, stock):
    """The largest relative distance of any two gradients."""
    return max(
        ((ours[name] - stock[name]).norm() / stock[name].norm().clamp_min(1e-12)).item() for name in stock
    )


@pytest.mark.parametrize(
    "name, checkpointing",
    [
        (name, mode)
        for name in CONFIGS
        for mode in ("none", "full", "selective")
        if (name, mode) != ("gemma2", "selective")  # its attention is eager only
    ],
)
def test_every_gradient_equals_the_stock_models_and_comes_once(name, checkpointing):
    model = tiny_model(name)
    loss, stock, _ = run(model)
    config = CheckpointingConfig(mode=checkpointing)
    with enable_tiled_mlp(model, TilingConfig(mlp=4)), enable_checkpointing(model, config):
        our_loss, ours, fired = run(model)
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert furthest(ours, stock) < 1e-6  # sums in another order
    assert set(fired.values()) == {1}


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "phi3"])
def test_half_precision_gradients_of_linear_layers_are_bitwise_the_stock_models(name):
    model = tiny_model(name, torch.bfloat16)
    _, stock, _ = run(model)
    with enable_tiled_mlp(model, TilingConfig(mlp=4)):
        _, ours, _ = run(model)
    assert all(torch.equal(ours[name], stock[name]) for name in stock)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_other_half_precision_weights_are_summed_in_fp32(name):
    model = tiny_model(name, torch.bfloat16)
    exact_model = copy.deepcopy(model).float()
    _, exact, _ = run(exact_model, rows=1, tokens=96)
    _, stock, _ = run(model, rows=1, tokens=96)
    with enable_tiled_mlp(model, TilingConfig(mlp=96)):
        _, ours, _ = run(model, rows=1, tokens=96)
    inner = [name for name in stock if ".mlp." in name]
    assert inner
    for weight in inner:
        error, usual = ((g[weight].float() - exact[weight]).norm() for g in (ours, stock))
        assert error <= 1.5 * usual


@pytest.mark.parametrize("tiles", [2, 3, 5, 33, 1000])
def test_any_number_of_tiles(tiles):
    model = tiny_model()
    _, stock, _ = run(model)
    with enable_tiled_mlp(model, TilingConfig(mlp=tiles)):
        _, ours, _ = run(model)
    assert furthest(ours, stock) < 1e-6


def test_under_autocast():
    model = tiny_model()
    with torch.autocast("cpu", torch.bfloat16):
        _, stock, _ = run(model)
        with enable_tiled_mlp(model, TilingConfig(mlp=4)):
            _, ours, fired = run(model)
    _, exact, _ = run(model)
    assert furthest(ours, stock) < 2**-8
    assert furthest(ours, exact) > 1e-4, "computed in fp32"
    assert all(gradient.dtype == torch.float32 for gradient in ours.values())
    assert set(fired.values()) == {1}


def test_dropout_is_the_same_in_backward_as_in_forward():
    """With dropout a finite difference of the loss, at one seed, is the gradient only if both draw alike."""
    model = tiny_model("gpt2").double()
    mlp = model.transformer.h[0].mlp
    mlp.dropout.p = 0.4
    hidden = torch.randn(3, 11, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight, direction = mlp.c_fc.weight, torch.randn_like(mlp.c_fc.weight)

    def loss():
        torch.manual_seed(1)
        return mlp(hidden).square().sum()

    with enable_tiled_mlp(model, TilingConfig(mlp=3)):
        value = loss()
        torch.manual_seed(2)  # what else draws meanwhile must not matter
        value.backward()
        losses = []
        for sign in (1, -1):
            with torch.no_grad():
                weight += sign * 1e-6 * direction
                losses.append(loss().item())
                weight -= sign * 1e-6 * direction
    slope = (losses[0] - losses[1]) / 2e-6
    assert slope == pytest.approx((weight.grad * direction).sum().item(), rel=1e-6)


def test_a_checkpointed_layer_computes_its_mlp_twice_as_without_tiles():
    model = tiny_model()
    calls = []
    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_hook(lambda module, args, output: calls.append(output.shape[1]))
    with (
        enable_tiled_mlp(model, TilingConfig(mlp=4)),
        enable_checkpointing(model, CheckpointingConfig(mode="full")),
    ):
        calls.clear()  # of the comparison with the stock MLP
        run(model, rows=1, tokens=12)
    assert calls == [3] * 4 * LAYERS * 2


def kept_and_peak(model, tokens=64):
    """Bytes of the MLP's call that wait for backward, and the peak above them while it is differentiated."""
    hidden = torch.randn(1, tokens, HIDDEN, requires_grad=True)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with StorageTracker() as tracker:
        output = model.model.layers[0].mlp(hidden)
        kept = tracker.live_bytes - output.nbytes
        tracker.reset_peak()
        output.sum().backward()
    return kept, tracker.peak_bytes


def test_inner_activations_of_one_tile_at_a_time():
    tokens, tiles = 64, 8
    model = tiny_model()
    stock_kept, stock_peak = kept_and_peak(model, tokens)
    inner = tokens * INTERMEDIATE * 4
    assert stock_kept >= 3 * inner
    with enable_tiled_mlp(model, TilingConfig(mlp=tiles)):
        kept, peak = kept_and_peak(model, tokens)
    assert kept == 0  # the input is the caller's
    whole = 4 * tokens * HIDDEN * 4  # output, its gradient, the input's gradient, a tile of it
    assert peak <= whole + 8 * inner / tiles
    assert peak < stock_peak


def test_trained_weights_gradients_leave_one_by_one():
    model = tiny_model().to(torch.bfloat16)
    mlp = model.model.layers[0].mlp
    alive = []

    def take(parameter):
        alive.append(sum(p.grad is not None for p in mlp.parameters()))
        parameter.grad = None

    for parameter in mlp.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    weight_bytes = HIDDEN * INTERMEDIATE * 2
    hidden = torch.randn(1, 4, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with enable_tiled_mlp(model, TilingConfig(mlp=2)), StorageTracker() as tracker:
        output = mlp(hidden)
        tracker.reset_peak()
        before = tracker.live_bytes
        output.sum().backward()
    assert alive == [1, 1, 1]
    assert tracker.peak_bytes - before < 2.5 * weight_bytes, "three gradients at once would be 3"


def test_nothing_waits_for_the_garbage_collector():
    model = tiny_model()
    ids = torch.arange(33).reshape(3, 11) + 3
    gc.collect()
    gc.disable()
    try:
        with (
            enable_tiled_mlp(model, TilingConfig(mlp=2)),
            enable_checkpointing(model, CheckpointingConfig(mode="full")),
            StorageTracker() as tracker,
        ):
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()
            assert tracker.live_bytes == 0
    finally:
        gc.enable()


def test_evaluation_is_tiled_too_and_needs_no_graph():
    model = tiny_model().eval()
    ids = torch.arange(22).reshape(2, 11)
    seen = []
    model.model.layers[0].mlp.down_proj.register_forward_hook(
        lambda module, args, out: seen.append(out.shape)
    )
    with torch.no_grad():
        stock = model(ids).logits
        with enable_tiled_mlp(model, TilingConfig(mlp=2)):
            seen.clear()
            ours = model(ids).logits
    assert seen == [(1, 11, HIDDEN)] * 2
    torch.testing.assert_close(ours, stock)


def test_frozen_weights_with_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=2, target_modules=["gate_proj", "down_proj"], init_lora_weights=False)
    )
    loss, stock, _ = run(model)
    with enable_tiled_mlp(model, TilingConfig(mlp=4)):
        our_loss, ours, fired = run(model)
    assert len(ours) == LAYERS * 4
    assert our_loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert furthest(ours, stock) < 1e-5
    assert set(fired.values()) == {1}


def test_weights_of_linear_layers_that_are_never_called():
    """PEFT multiplies the adapters of fused experts with each other, and adds the product to the experts' weights."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    model = peft.get_peft_model(tiny_model("mixtral"), config)
    _, stock, _ = run(model)
    with enable_tiled_mlp(model, TilingConfig(mlp=4)):
        _, ours, fired = run(model)
    assert sum(".experts." in name for name in stock) == LAYERS * 4
    assert furthest(ours, stock) < 1e-5
    assert set(fired.values()) == {1}


class UsesAWeightTwice(nn.Module):
    """One linear layer, called once and read once."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, hidden_states):
        return torch.tanh(self.proj(hidden_states)) @ self.proj.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_that_is_called_and_whose_weight_is_read(dtype):
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp = UsesAWeightTwice()
    model.to(dtype)
    _, stock, _ = run(model)
    with enable_tiled_mlp(model, TilingConfig(mlp=4)):
        _, ours, fired = run(model)
    assert furthest(ours, stock) < (1e-6 if dtype == torch.float32 else 2**-7)
    assert set(fired.values()) == {1}


def test_one_tile_is_the_stock_model():
    model = tiny_model()
    with enable_tiled_mlp(model, TilingConfig()):
        assert all("forward" not in vars(layer.mlp) for layer in model.model.layers)


def test_bad_number_explains_itself():
    with pytest.raises(UserError, match=r"tiling.mlp must be at least 1, got 0. Set it to 1 for no tiles."):
        enable_tiled_mlp(tiny_model(), TilingConfig(mlp=0))


def test_layers_without_an_mlp_of_their_own_are_refused_by_name():
    model = AutoModelForCausalLM.from_config(
        hf.OPTConfig(**FAMILY_SIZES, ffn_dim=48, word_embed_proj_dim=HIDDEN, dropout=0.0)
    )
    with pytest.raises(ModelError, match=r"OPTDecoderLayer has self_attn, .*fc1, fc2.*Set tiling.mlp=1"):
        enable_tiled_mlp(model, TilingConfig(mlp=2))


class MixesTokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden):
        return self.linear(hidden) + hidden.mean(dim=1, keepdim=True)


class TakesTwo(MixesTokens):
    def forward(self, hidden, residual):
        return self.linear(hidden) + residual


class GivesTwo(MixesTokens):
    def forward(self, hidden):
        return self.linear(hidden), hidden


@pytest.mark.parametrize("kind", [MixesTokens, TakesTwo, GivesTwo])
def test_mlps_that_are_more_than_a_function_of_each_token_are_refused(kind):
    model = tiny_model()
    model.model.layers[1].mlp = kind()
    with pytest.raises(ModelError, match=rf"{kind.__name__} takes more, or gives.*Set tiling.mlp=1"):
        enable_tiled_mlp(model, TilingConfig(mlp=2))
    assert "forward" not in vars(model.model.layers[0].mlp)


def test_routers_whose_logits_make_a_loss_are_refused():
    config = hf.MixtralConfig(**FAMILY_SIZES, num_local_experts=4, output_router_logits=True)
    with pytest.raises(ModelError, match=r"output_router_logits=true in its config. Set tiling.mlp=1"):
        enable_tiled_mlp(AutoModelForCausalLM.from_config(config), TilingConfig(mlp=2))
