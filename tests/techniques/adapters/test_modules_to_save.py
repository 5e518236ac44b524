"""Modules trained and saved whole next to adapters: PEFT's files and mathematics, without its copies."""

from __future__ import annotations

import pytest
import torch
from tiny_models import losses_of_adamw, tiny_llama

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.adapters.saved_adapter import merge_adapter

IDS = torch.arange(40).view(2, 20) % 64


def _config(*modules: str, **settings) -> AdapterConfig:
    return AdapterConfig(name="lora", r=2, target_modules=("q_proj",), modules_to_save=modules, **settings)


@pytest.mark.parametrize("tied", [False, True])
def test_training_equals_pefts_and_vanilla_peft_loads_the_files(tmp_path, tied):
    names = ("embed_tokens",) if tied else ("embed_tokens", "lm_head")
    ours, base = (tiny_llama(tie_word_embeddings=tied) for _ in range(2))
    base.save_pretrained(tmp_path / "base")
    theirs = get_peft_model(
        base,
        LoraConfig(
            r=2,
            lora_alpha=32,
            target_modules=["q_proj"],
            modules_to_save=list(names),
            ensure_weight_tying=tied,
            task_type="CAUSAL_LM",
        ),
    )
    lora = enable_lora(ours, _config(*names), base_name=str(tmp_path / "base"))
    matrices = {name: value for name, value in theirs.named_parameters() if "lora_" in name}
    for name, value in lora.parameters().items():
        if "lora_" in name:
            value.data.copy_(matrices[f"base_model.model.{name}"])
    num_elements = {model: sum(one.numel() for one in model.parameters()) for model in (ours, theirs)}
    table = 64 * 32
    assert num_elements[theirs] - num_elements[ours] == len(names) * table  # the originals of PEFT's copies
    assert losses_of_adamw(ours, IDS) == losses_of_adamw(theirs, IDS)
    (tmp_path / "adapter").mkdir()
    lora.save(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert torch.equal(loaded(IDS).logits, ours.eval()(IDS).logits)
    assert not torch.equal(
        loaded(IDS).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "base")(IDS).logits
    )


@pytest.mark.parametrize("tied", [False, True])
def test_they_are_merged_loaded_again_and_taken_off(tmp_path, tied):
    model = tiny_llama(tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "base")
    lora = enable_lora(model, _config("embed_tokens"), base_name=str(tmp_path / "base"))
    losses_of_adamw(model, IDS)
    (tmp_path / "adapter").mkdir()
    lora.save(tmp_path / "adapter")
    wanted = model.eval()(IDS).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merge_adapter(merged, tmp_path / "adapter", torch.float32)
    torch.testing.assert_close(merged(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    merged.save_pretrained(tmp_path / "merged")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied
    assert torch.equal(read(IDS).logits, merged(IDS).logits)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    fresh = enable_lora(again, _config("embed_tokens"))
    fresh.load(tmp_path / "adapter")
    assert torch.equal(again.eval()(IDS).logits, wanted)
    assert again.model.embed_tokens.weight.requires_grad
    fresh.remove()
    assert all(one.requires_grad for one in again.parameters())
    assert type(again.model.layers[0].self_attn.q_proj) is torch.nn.Linear


@pytest.mark.parametrize(
    "modules, model, says",
    [
        (("embed_token",), {}, "has none 'embed_token'.*embed_tokens.*model.embed_tokens, lm_head"),
        (("norm",), {}, "names model.norm, and PEFT would train model.layers.0.input_layernorm for it"),
        (
            ("lm_head",),
            {"tie_word_embeddings": True},
            "whose weight is the embedding's. Name model.embed_tokens",
        ),
        (("act_fn",), {}, "trains parameters, and model.layers.0.mlp.act_fn has none"),
        (("embed_tokens",), {"dtype": torch.float16}, "those of model.embed_tokens are float16"),
        (("self_attn",), {}, "model.layers.0.self_attn.q_proj has an adapter, too"),
    ],
)
def test_what_cannot_be_trained_whole_says_why_and_leaves_the_model(modules, model, says):
    plain = tiny_llama(**model)
    names = [name for name, _ in plain.named_parameters()]
    with pytest.raises(UserError, match=says):
        enable_lora(plain, _config(*modules))
    assert [name for name, _ in plain.named_parameters()] == names
    assert all(one.requires_grad for one in plain.parameters())


def test_rows_that_peft_has_trained_are_merged(tmp_path):
    base = tiny_llama()
    base.save_pretrained(tmp_path / "base")
    settings = LoraConfig(
        r=2,
        target_modules=["q_proj"],
        trainable_token_indices={"embed_tokens": [3, 7], "lm_head": [3]},
        task_type="CAUSAL_LM",
    )
    theirs = get_peft_model(base, settings)
    losses_of_adamw(theirs, IDS)
    theirs.save_pretrained(tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    rows = merged.model.embed_tokens.weight[[3, 7]].clone()
    merge_adapter(merged, tmp_path / "adapter", torch.float32)
    assert not torch.equal(merged.model.embed_tokens.weight[[3, 7]], rows)
    torch.testing.assert_close(merged(IDS).logits, theirs.eval()(IDS).logits, rtol=1e-4, atol=1e-5)
