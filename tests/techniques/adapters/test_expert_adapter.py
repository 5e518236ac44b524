"""Adapters of fused experts: PEFT's numbers and files without its sum of weight and adapter, of packed experts, too."""

from __future__ import annotations

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DbrxConfig, GptOssConfig, LlamaConfig, Qwen3MoeConfig

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.foundation.upstream.grouped_experts import weights_of
from lowmem_ft.models.quantizing.nf4_experts import unpack
from lowmem_ft.models.quantizing.packed_experts import PackedExperts, fused_experts
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.fused_adapter import enable_fused_adapters
from lowmem_ft.techniques.adapters.lora import enable_lora

NUM_EXPERTS = 6
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=NUM_EXPERTS, moe_intermediate_size=64),
    "gpt_oss": GptOssConfig(**SIZES, num_local_experts=NUM_EXPERTS),  # with biases, and its axes swapped
}
DBRX = DbrxConfig(
    d_model=64,
    n_heads=4,
    n_layers=2,
    vocab_size=96,
    attn_config={"kv_n_heads": 2, "rope_theta": 10000.0},
    ffn_config={"hidden_size": 64, "ffn_hidden_size": 48},
)
IDS = torch.arange(40).view(2, 20)


def lora(**options):
    return AdapterConfig(name="lora", r=4, **{"target_parameters": EXPERTS, **options})


def model_of(family="qwen3_moe", *, packed=False):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]).train()
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            nn.init.normal_(parameter)
    if packed:
        pytest.importorskip("bitsandbytes")
        for _, module in list(fused_experts(model, "nf4")):
            PackedExperts.install(module, torch.float32, "nf4")
    return model


def unpacked(model):
    """Return a model of the same weights in float32."""
    plain = model_of(model.config.model_type)
    modules = dict(model.named_modules())
    for name, module in list(fused_experts(plain, "nf4")):
        for weight in weights_of(module):
            packed = modules[name]._parameters[weight]
            exact = unpack(packed.data, packed.quant_state, slice(0, NUM_EXPERTS), torch.float32)
            module._parameters[weight].data = exact
    return plain


def adapted(model, *, fused, **options):
    torch.manual_seed(1)
    adapter = enable_lora(model, lora(**options), base_name="base")
    for name, parameter in adapter.parameters().items():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    kernel = "fused" if fused else "peft"
    return adapter, enable_fused_adapters(model, lora(kernel=kernel, **options))


def loss_and_gradients(model, adapter):
    loss = model(input_ids=IDS, labels=IDS).loss
    parameters = adapter.parameters()
    return loss.detach(), dict(
        zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True)
    )


def test_experts_that_get_no_adapter_are_no_warning(recwarn):
    """PEFT makes rank patterns for experts that are one parameter, and misses modules of that name."""
    enable_lora(
        model_of(), AdapterConfig(name="lora", r=4, target_modules=("q_proj", "gate_proj", "up_proj"))
    )
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("packed", [False, True], ids=["float32", "packed"])
@pytest.mark.parametrize("family", CONFIGS)
def test_losses_and_gradients_are_those_of_pefts_sum(family, packed):
    ours = model_of(family, packed=packed)
    theirs = unpacked(ours) if packed else model_of(family)
    found = loss_and_gradients(ours, adapted(ours, fused=True)[0])
    expected = loss_and_gradients(theirs, adapted(theirs, fused=False)[0])
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
    assert sum("experts" in name for name in found[1]) == 2 * 2 * len(EXPERTS)
    for name, gradient in found[1].items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", CONFIGS)
def test_vanilla_peft_loads_what_packed_experts_have_learnt(family, tmp_path):
    model = model_of(family, packed=True)
    plain = unpacked(model)
    adapter, _ = adapted(model, fused=True, target_modules=())
    adapter.save(tmp_path)
    theirs = peft.PeftModel.from_pretrained(plain, tmp_path)
    with torch.no_grad():
        logits = model.eval()(IDS).logits
        torch.testing.assert_close(theirs.eval()(IDS).logits, logits, rtol=1e-4, atol=1e-5)
        with adapter.peft_model.disable_adapter():
            assert (model(IDS).logits - logits).abs().max() > 1e-2


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "peft"])
def test_no_weight_of_all_experts_is_made(fused):
    model = model_of()
    adapter, _ = adapted(model, fused=fused, target_modules=())
    experts = model.model.layers[0].mlp.experts
    parameters = [value for name, value in adapter.parameters().items() if "layers.0." in name]
    hidden, chosen, shares = torch.randn(3, 64), torch.tensor([[0, 1], [4, 1], [2, 0]]), torch.rand(3, 2)
    with StorageTracker() as tracker:
        torch.autograd.grad(experts(hidden, chosen, shares).sum(), parameters)
    assert (tracker.peak_bytes < experts.get_base_layer().gate_up_proj.nbytes) == fused


def test_taken_off_it_is_the_stock_model():
    with torch.no_grad():
        expected = model_of()(IDS).logits
        model = model_of()
        adapter, fused = adapted(model, fused=True)
        assert not torch.equal(model(IDS).logits, expected)
        fused.remove()
        adapter.remove()
        assert "forward" not in vars(model.model.layers[0].mlp.experts)
        assert torch.equal(model(IDS).logits, expected)


def test_adapters_begin_as_float32_draws_and_packed_experts_as_before():
    one, other = model_of(), model_of(packed=True)
    own = {id(parameter) for parameter in other.parameters()}
    draws = [adapted(model, fused=True)[0].parameters() for model in (one.bfloat16(), other)]
    assert draws[0].keys() == draws[1].keys()
    for name, parameter in draws[0].items():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, draws[1][name])
        assert not torch.equal(parameter, parameter.bfloat16().float()), name
    kept = [parameter for parameter in other.parameters() if not parameter.requires_grad]
    assert {id(parameter) for parameter in kept} == own


def test_linear_layers_alone_by_all_linear_once_parameters_are_named():
    adapter, _ = adapted(model_of(), fused=True, target_parameters=EXPERTS[1:])
    places = {name.partition(".lora")[0].rpartition("layers.")[2][2:] for name in adapter.parameters()}
    assert places == {"mlp.experts", *(f"self_attn.{name}_proj" for name in "qkvo")}


def test_names_that_peft_would_ignore_are_errors():
    names = ("mlp.experts.up_proj", "experts.down_projs", "input_layernorm.weight")
    with pytest.raises(UserError) as error:
        enable_lora(model_of(), lora(target_parameters=names))
    message = str(error.value)
    assert "Qwen3MoeForCausalLM has none 'mlp.experts.up_proj'" in message
    assert "Did you mean `mlp.experts.down_proj`" in message
    assert "It has mlp.experts.down_proj, mlp.experts.gate_up_proj." in message
    assert "layers.0.input_layernorm.weight has 1" in message
    dense = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    with pytest.raises(UserError, match="no fused experts: leave the key out"):
        enable_lora(AutoModelForCausalLM.from_config(dense), lora())


@pytest.mark.parametrize("name", ["self_attn.q_proj.weight", "lm_head.weight", "embed_tokens.weight"])
def test_a_linear_layer_is_named_by_its_module(name):
    with pytest.raises(UserError, match=rf"got '{name}'\. Name a linear layer in adapter\.target_modules"):
        enable_lora(model_of(), lora(target_parameters=(name,)))


@pytest.mark.parametrize(
    "config, name, said",
    [
        (DBRX, "experts.mlp.w1", r"w1 of DbrxForCausalLM is read by the module around it.*Leave the key"),
        (
            CONFIGS["gpt_oss"],
            "experts.gate_up_proj_bias",
            r"of GptOssForCausalLM is a bias.* It has mlp\.experts",
        ),
    ],
    ids=["DBRX", "a bias"],
)
def test_what_is_no_matrix_of_its_own_module_is_refused(config, name, said):
    with pytest.raises(UserError, match=said):
        enable_lora(AutoModelForCausalLM.from_config(config), lora(target_parameters=(name,)))


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=str)
def test_what_a_sum_of_weight_and_adapter_cannot_have_is_refused(kind):
    (problem,) = lora(**kind).problems()
    assert "leave adapter.target_parameters out" in problem


def test_packed_experts_have_no_forward_of_pefts():
    with pytest.raises(UserError, match=r"adapter\.kernel=peft .* down_proj is.*Set adapter\.kernel=fused"):
        adapted(model_of(packed=True), fused=False)
    model = model_of(packed=True)
    adapter, _ = adapted(model, fused=True, target_modules=())
    adapter.peft_model.add_adapter("second", adapter.peft_model.peft_config["default"])
    adapter.peft_model.base_model.set_adapter(["default", "second"])
    with pytest.raises(UserError, match=r"down_proj has 2 active adapters.*model\.quantization=none"):
        model(IDS)
