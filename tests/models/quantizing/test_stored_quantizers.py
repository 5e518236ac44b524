"""Checkpoints in MXFP4 and FP8: kept as they are, unpacked to transformers' own bits, refused where none trains."""

from __future__ import annotations

import functools
import json
import logging
import re

import pytest
import torch
from packed_checkpoints import BLOCK, CONFIGS, packed_checkpoint
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.foundation.tensors.logical_size import logical_numel
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.model_files import refuse_unfit
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.quantizing import block_fp8, mxfp4, packed_experts
from lowmem_ft.recipe.rules.memory_rules import packed_base_is_frozen_and_whole
from lowmem_ft.recipe.tree import Recipe
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import enable_lora

IDS = torch.arange(40).view(2, 20)
TYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints by family, each made once."""
    return functools.cache(lambda family: packed_checkpoint(family, tmp_path_factory.mktemp(family)))


def load(folder, quantization="none", **options):
    config = ModelConfig(name_or_path=str(folder), quantization=quantization, **options)
    device = torch.device("cpu")
    return load_model(config, load_model_config(config), attn_implementation="eager", device=device, seed=1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_mxfp4_is_unpacked_to_transformers_own_bits(dtype):
    """Every code with every exponent but the one that stands for NaN."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).view(255, 1).repeat(1, 16)
    expected = convert_moe_packed_tensors(blocks.unsqueeze(1), scales.unsqueeze(1), dtype=dtype)
    pairs = mxfp4.pairs_of_bytes(dtype, blocks.device)
    found = mxfp4.unpack(blocks.unsqueeze(1), scales.unsqueeze(1), pairs).transpose(1, 2)
    found, expected = (values.flatten().view(torch.uint8) for values in (found, expected))
    assert torch.equal(found, expected)  # signs of zeros, too


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("scales_type", [torch.float32, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("lead", [(), (3,)], ids=["a layer", "experts"])
def test_fp8_is_unpacked_to_transformers_own_bits(dtype, scales_type, lead):
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (*lead, 96, 64), dtype=torch.uint8)
    weight = torch.where(codes % 128 == 127, 0, codes).view(torch.float8_e4m3fn)
    scales = (torch.rand(*lead, 3, 4) / 448).to(scales_type)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scales, dtype)
    assert torch.equal(block_fp8.unpack(weight, scales, BLOCK, dtype), expected)


def test_a_last_block_is_cut_short():
    """transformers' own (5.23) takes 40 rows in two blocks for two of 20."""
    weight = torch.ones(40, 40).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    found = block_fp8.unpack(weight, scales, BLOCK, torch.float32)
    assert torch.equal(found, scales.repeat_interleave(32, 0)[:40].repeat_interleave(16, 1)[:, :40])


@pytest.mark.parametrize("family", CONFIGS)
def test_the_bytes_of_the_files_stay_in_memory(family, folder, caplog):
    with caplog.at_level(logging.INFO):
        model = load(folder(family), dtype="bfloat16")
    in_files = load_file(folder(family) / "model.safetensors")
    in_memory = sum(weight.nbytes for weight in model.parameters())
    buffers = {name for name, _ in model.named_buffers()}
    assert in_memory == sum(tensor.nbytes for name, tensor in in_files.items() if name not in buffers)
    assert "Base: its weights stay in" in caplog.text
    if family == "gpt_oss":
        for name, weight in in_files.items():
            assert torch.equal(model.get_parameter(name), weight), name
    packed = [weight for weight in model.parameters() if weight.dtype in (torch.uint8, torch.float8_e4m3fn)]
    assert packed
    assert not any(weight.requires_grad for weight in packed)
    whole = load(folder(family), "dequantize", dtype="bfloat16")
    assert sum(map(logical_numel, model.parameters())) == whole.num_parameters()
    # Routers of DeepSeek-V3 are in float32 since transformers 5.24, by their class.
    types = {
        weight.dtype for name, weight in whole.named_parameters() if not name.endswith("mlp.gate.weight")
    }
    assert types == {torch.bfloat16}
    in_float32 = load(folder(family), "dequantize", dtype="float32")
    assert {weight.dtype for weight in in_float32.parameters()} == {torch.float32}
    assert in_memory < 0.8 * sum(weight.nbytes for weight in whole.parameters())
    assert not hasattr(whole.config, "quantization_config")


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("family", CONFIGS)
def test_losses_and_gradients_are_those_of_the_unpacked_model(family, autocast, folder, monkeypatch):
    dtype = "float32" if autocast else "bfloat16"
    models = load(folder(family), dtype=dtype), load(folder(family), "dequantize", dtype=dtype)
    models[1].config._experts_implementation = "grouped_mm"
    monkeypatch.setattr(packed_experts, "_UNPACKED_BYTES", 1)  # one expert at a time
    results = []
    for model in models:
        embedding = model.get_input_embeddings().weight
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=IDS, labels=IDS).loss
        (gradient,) = torch.autograd.grad(loss, embedding)
        results.append((loss.detach(), gradient))
    (loss, gradient), (expected, of_unpacked) = results
    if family == "qwen3":
        assert loss == expected
        assert torch.equal(gradient, of_unpacked)
    torch.testing.assert_close(loss, expected, rtol=2e-3, atol=0)
    # Under autocast transformers' own products of experts (5.23) stay in float32.
    assert (gradient - of_unpacked).norm() < (0.05 if autocast else 0.02) * of_unpacked.norm()
    assert of_unpacked.norm() > 0


def test_a_linear_layer_saves_nothing_for_backward():
    layer = nn.Linear(64, 96, bias=True).requires_grad_(False)
    layer.__class__ = block_fp8.Fp8Linear
    layer.weight = nn.Parameter(torch.randn(96, 64).to(torch.float8_e4m3fn), requires_grad=False)
    layer.weight_scale_inv = nn.Parameter(torch.rand(3, 4), requires_grad=False)
    layer.block_size = BLOCK
    kept, x = [], torch.randn(5, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda x: x):
        product = layer(x)
    assert not kept
    weight = layer.unpacked_weight(torch.float32)
    assert torch.equal(product, F.linear(x, weight, layer.bias))
    (gradient,) = torch.autograd.grad(product.sum(), x)
    torch.testing.assert_close(gradient, weight.sum(0).expand(5, 64))


def test_a_random_model_is_plain(folder):
    model = load(folder("gpt_oss"), weights="random")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    "quantization, said",
    [
        (
            {"quant_method": "awq", "bits": 4},
            r"awq.*MXFP4 or FP8 with block scales, not in awq.*was made from",
        ),
        ({"load_in_4bit": True, "quant_method": "bitsandbytes"}, r"not in bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": None}, r"two numbers.*weight_block_size=None"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, r"activation_scheme='static'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, r"expert_dtype='fp4'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt=e4m3; .*has fmt='e5m2'"),
        (
            {"quant_method": "fp8", "dequantize": True},
            r"dequantize=true.*model\.quantization=dequantize does",
        ),
        (
            {"quant_method": "fp8", "modules_to_not_convert": 3},
            r"list of names or patterns of modules, got 3",
        ),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["(["]}, r"patterns of modules, got \['\(\['\]"),
        ({"quant_method": ["fp8"]}, r"must name the format .* in quant_method"),
        ({}, r"must name the format .* in quant_method"),
    ],
    ids=str,
)
def test_another_format_is_refused_by_its_name(quantization, said, folder, tmp_path):
    fields = json.loads((folder("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=said):
        load(tmp_path)


@pytest.mark.parametrize("quantization", [[1, 2], "fp8", 3])
def test_what_is_no_quantization_config_is_refused(quantization, folder, tmp_path):
    fields = json.loads((folder("qwen3") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=rf"must name the format .* is {re.escape(repr(quantization))}\."):
        refuse_unfit(ModelConfig(name_or_path=str(tmp_path)))


def test_packed_weights_are_not_packed_again_and_plain_ones_not_unpacked(folder, tmp_path):
    with pytest.raises(ModelError, match=r"second rounding.*model\.quantization=none, which keeps"):
        load(folder("gpt_oss"), "nf4")
    load(folder("qwen3"), "dequantize").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"are plain\. Set model\.quantization=none"):
        load(tmp_path, "dequantize")


def test_mxfp4_in_a_model_without_experts_is_refused(folder, tmp_path):
    fields = json.loads((folder("qwen3") / "config.json").read_text())
    quantization = json.loads((folder("gpt_oss") / "config.json").read_text())["quantization_config"]
    packed_checkpoint("qwen3", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=r"has none that are packed"):
        load(tmp_path)


@pytest.mark.parametrize(
    "family, retyped, dtype, said",
    [
        (
            "qwen3",
            "q_proj.weight",
            torch.bfloat16,
            r"type F8_E4M3; .*q_proj\.weight in the files.* is in BF16\.",
        ),
        ("qwen3", "q_proj.weight", torch.float8_e5m2, r"is in F8_E5M2, and 1 more\."),
        ("gpt_oss", "down_proj_scales", torch.bfloat16, r"type U8; .*down_proj_scales in the files"),
        ("qwen3", None, None, r"no quantization_config.*weights in FP8 with scales \(model\.layers\.0"),
    ],
)
@pytest.mark.parametrize("quantization", ["none", "dequantize"])
def test_files_hold_what_the_config_says(family, retyped, dtype, said, quantization, folder, tmp_path):
    fields = json.loads((folder(family) / "config.json").read_text())
    tensors = load_file(folder(family) / "model.safetensors")
    count = 2 if dtype is torch.float8_e5m2 else 1
    for name in [name for name in tensors if retyped and name.endswith(retyped)][:count]:
        tensors[name] = tensors[name].float().to(dtype)
    if retyped is None:
        del fields["quantization_config"]
        quantization = "none"
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=said):
        load(tmp_path, quantization)


@pytest.mark.parametrize(
    "family, missing, said",
    [
        (
            "qwen3",
            "layers.0.self_attn.q_proj.weight",
            r"missing: model\.layers\.0\.self_attn\.q_proj\.weight\)",
        ),
        (
            "qwen3_moe",
            "layers.0.mlp.experts.1.up_proj.weight",
            r"must hold all experts of each layer, with their",
        ),
    ],
)
def test_a_missing_packed_weight_is_named(family, missing, said, folder, tmp_path):
    tensors = load_file(folder(family) / "model.safetensors")
    del tensors[f"model.{missing}"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder(family) / "config.json").read_text())
    with pytest.raises(ModelError, match=said):
        load(tmp_path)


def test_dora_of_fp8_is_refused_as_peft_would_leave_the_scales_out(folder):
    model = load(folder("qwen3"))
    with pytest.raises(
        UserError, match=r"without the scales of a base in FP8.*model\.quantization=dequantize"
    ):
        enable_lora(model, AdapterConfig(name="lora", use_dora=True))
    plan = ModelConfig(name_or_path=str(folder("qwen3")))
    recipe = Recipe(model=plan, adapter=AdapterConfig(name="lora", use_dora=True))
    assert any("use_dora=false" in problem for problem in packed_base_is_frozen_and_whole.problems(recipe))
