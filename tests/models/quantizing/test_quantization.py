"""Weights in 4 and 8 bits: which, from what, how much they take, and that a step goes through them."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

pytest.importorskip("bitsandbytes")

from lowmem_ft.foundation.errors import MissingPackageError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model

CPU = torch.device("cpu")
IDS = torch.arange(40).view(2, 20)
LINEAR_WEIGHTS = 2 * (4 * 64 * 64 + 3 * 64 * 128)


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=96
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def load(folder, quantization, **options):
    precision = options.pop("mixed_precision", "no")
    config = ModelConfig(name_or_path=str(folder), quantization=quantization, **options)
    return load_model(
        config,
        load_model_config(config),
        attn_implementation="sdpa",
        device=CPU,
        seed=1,
        mixed_precision=precision,
    )


def weights_by_type(model):
    types = {}
    for name, parameter in model.named_parameters():
        types.setdefault(type(parameter).__name__, []).append(name)
    return types


@pytest.mark.parametrize("weights", ["pretrained", "random"])
@pytest.mark.parametrize("quantization, kind", [("nf4", "Params4bit"), ("int8", "Int8Params")])
def test_linear_layers_are_quantised_and_all_else_keeps_its_type(folder, quantization, kind, weights):
    model = load(folder, quantization, dtype="bfloat16", weights=weights)
    types = weights_by_type(model)
    assert len(types[kind]) == 14
    assert all(".layers." in name and "proj" in name for name in types[kind])
    others = [model.get_parameter(name) for name in types["Parameter"]]
    assert {parameter.dtype for parameter in others} == {torch.bfloat16}
    assert "lm_head.weight" in types["Parameter"]


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
@pytest.mark.parametrize("weights", ["pretrained", "random"])
def test_the_loss_is_near_that_of_the_exact_weights(folder, quantization, weights):
    with torch.no_grad():
        exact = load(folder, "none", weights=weights)(input_ids=IDS, labels=IDS).loss
        loss = load(folder, quantization, weights=weights)(input_ids=IDS, labels=IDS).loss
    assert loss == pytest.approx(exact.item(), rel=0.02)  # near ln(96), as weights are random
    assert loss != exact


def test_weights_of_a_seed_are_the_same_ones_from_a_file_and_at_random(folder):
    """Layers that come from no checkpoint go through the same rounding."""
    random = load(folder, "nf4", weights="random")
    load(folder, "none", weights="random").save_pretrained(folder)
    read = load(folder, "nf4")
    for name, parameter in read.named_parameters():
        assert torch.equal(parameter, random.get_parameter(name)), name


@pytest.mark.parametrize("quantization, bytes_a_weight", [("nf4", 0.5 + 1 / 64 + 4 / 64 / 256), ("int8", 1)])
def test_no_copy_of_the_model_in_16_bits_comes_first(folder, quantization, bytes_a_weight):
    with StorageTracker() as tracker:
        load(folder, quantization, dtype="bfloat16")
        others = 2 * (2 * 96 * 64 + 5 * 64) + 2 * 16 * 4  # embedding, head, norms; the rotary frequencies
        tables_and_scales = 14 * (2 * 1024 + 4 * 128)
        exact = LINEAR_WEIGHTS * bytes_a_weight + others
        largest = 64 * 128
        assert tracker.peak_bytes < exact + tables_and_scales + 3 * 4 * largest
        assert tracker.peak_bytes < 2 * LINEAR_WEIGHTS + others


def test_4_bit_weights_are_unpacked_to_the_type_of_the_run(folder):
    def compute_dtype(**options):
        return load(folder, "nf4", **options).model.layers[0].mlp.up_proj.compute_dtype

    assert compute_dtype() == torch.float32
    assert compute_dtype(dtype="bfloat16") == torch.bfloat16
    assert compute_dtype(mixed_precision="bf16") == torch.bfloat16
    assert compute_dtype(weights="random", dtype="bfloat16") == torch.bfloat16


def test_gradients_pass_through_also_after_an_evaluation(folder):
    """On processors with AVX512-BF16 bitsandbytes repacks weights in evaluation, and no gradient comes through then."""
    model = load(folder, "nf4", dtype="bfloat16")
    hidden = torch.randn(1, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    layer = model.model.layers[0].mlp.train()

    def gradient():
        (found,) = torch.autograd.grad(layer(hidden).sum(), hidden)
        return found

    before = gradient()
    with torch.no_grad():
        layer.eval()(hidden)
    layer.train()
    assert torch.equal(gradient(), before)
    assert before.abs().sum() > 0


def test_gpt2s_transposed_layers(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=96, bos_token_id=0, eos_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for weights in ("pretrained", "random"):
        exact, model = load(tmp_path, "none", weights=weights), load(tmp_path, "nf4", weights=weights)
        assert len(weights_by_type(model)["Params4bit"]) == 8
        logits = [each.eval()(IDS).logits.detach() for each in (exact, model)]
        torch.testing.assert_close(logits[1], logits[0], atol=0.1, rtol=0.1)


def test_what_bitsandbytes_logs_on_each_import_is_not_shown_to_whoever_imports_us():
    """Without a handler at the root, Python writes warnings of any library to stderr."""
    code = "import lowmem_ft, logging; print(logging.getLogger('bitsandbytes.backends.cpu.ops').getEffectiveLevel())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > logging.WARNING


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ModelConfig(name_or_path="any").require_packages()
    with pytest.raises(MissingPackageError, match=r"model\.quantization=nf4 needs .*\[bitsandbytes\]"):
        ModelConfig(name_or_path="any", quantization="nf4").require_packages()
