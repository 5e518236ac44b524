"""What is saved is what vanilla ``from_pretrained`` loads, and a folder that is not gets noticed."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.models.saving import save_model, verify_saved_model

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=97),
    "tied": LlamaConfig(**SIZES, num_key_value_heads=1, vocab_size=97, tie_word_embeddings=True),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=97),
    "mixture_of_experts": MixtralConfig(**SIZES, num_key_value_heads=1, vocab_size=97, num_local_experts=4),
}


class NoTokenizer:
    def save_pretrained(self, folder):
        pass


@pytest.fixture(params=CONFIGS)
def model(request):
    return AutoModelForCausalLM.from_config(CONFIGS[request.param])


def test_a_saved_model_loads_as_it_was(model, tmp_path):
    save_model(model, NoTokenizer(), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def change_one(folder, change):
    file = folder / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in sorted(weights) if weights[name].dim() == 2)
    change(weights, name)
    save_file(weights, file, metadata={"format": "pt"})


def test_a_missing_weight_is_noticed(model, tmp_path):
    save_model(model, NoTokenizer(), tmp_path)
    change_one(tmp_path, lambda weights, name: weights.pop(name))
    with pytest.raises(CheckpointError, match=r"missing|not the one in memory|cannot be read back"):
        verify_saved_model(model, tmp_path)


def test_a_weight_of_another_shape_is_noticed(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    save_model(model, NoTokenizer(), tmp_path)
    change_one(tmp_path, lambda weights, name: weights.update({name: weights[name][:-1].contiguous()}))
    with pytest.raises(CheckpointError, match="mismatched"):
        verify_saved_model(model, tmp_path)


def test_a_truncated_file_is_noticed(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    save_model(model, NoTokenizer(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="cannot be read back"):
        verify_saved_model(model, tmp_path)


def test_weights_that_came_apart_are_both_saved(tmp_path):
    """transformers before 5 kept one of them, as their config says they are tied."""
    model = AutoModelForCausalLM.from_config(CONFIGS["tied"])
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    save_model(model, NoTokenizer(), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, 2 * loaded.model.embed_tokens.weight)


def test_a_tie_that_the_folder_lost_is_noticed(tmp_path):
    model = AutoModelForCausalLM.from_config(CONFIGS["tied"])
    save_model(model, NoTokenizer(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(
        config.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    )
    with pytest.raises(CheckpointError, match="tied weights"):
        verify_saved_model(model, tmp_path)
