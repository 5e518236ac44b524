"""Bytes of a cache of keys and values, from shapes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers

from lowmem_ft.models.config import ModelConfig
from lowmem_ft.planning.estimator.answer_size import size_of_answers

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
BYTES_OF_TOKEN = 3 * 2 * 2 * 8 * 4
"""Keys and values of 3 layers, 2 heads of 8 numbers each, in float32; a layer with a window counts its tokens, too."""

MODELS = {
    "dense": (transformers.LlamaConfig(**SIZES), 40 * BYTES_OF_TOKEN),
    "windows": (transformers.MistralConfig(**SIZES, sliding_window=24), 24 * BYTES_OF_TOKEN + 3 * 8),
    "experts": (transformers.MixtralConfig(**SIZES, num_local_experts=4), 40 * BYTES_OF_TOKEN),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_cache_of_forty_tokens(name, tmp_path, caplog):
    config, expected = MODELS[name]
    config.save_pretrained(tmp_path)
    size = size_of_answers(ModelConfig(name_or_path=str(tmp_path), weights="random"), 40)
    assert size.cache_bytes == expected
    assert "not known" not in caplog.text


@pytest.mark.parametrize(
    "forward, reason",
    [
        (lambda self, **_: torch.ones(2, device="meta").sum().item(), "meta tensors"),
        (lambda self, **_: SimpleNamespace(past_key_values=()), "a tuple, has no layers"),
    ],
    ids=["values", "another cache"],
)
def test_a_warning_says_why_shapes_do_not_tell_it(forward, reason, tmp_path, monkeypatch, caplog):
    config, _ = MODELS["dense"]
    config.save_pretrained(tmp_path)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    size = size_of_answers(ModelConfig(name_or_path=str(tmp_path), weights="random"), 40)
    assert size.cache_bytes is None
    assert size.weight_bytes > 0
    assert "What LlamaForCausalLM keeps of each token is not known from shapes: " in caplog.text
    assert reason in caplog.text
