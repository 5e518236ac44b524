"""Models that look ahead, whatever their config says, and tokenizers that know no word: refused before a step."""

from __future__ import annotations

import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    ZayaConfig,
)

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.training.run.loop import train

OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.is_causal = {is_causal}
"""
ONE_STEP = ("training.max_steps=1", "training.save_steps=null", "model.weights=pretrained")


@pytest.fixture
def own_model(tmp_path, recipes_folder):
    """A model folder with Python code of its own."""

    def make(*, is_causal: bool):
        folder = tmp_path / "own"
        config = LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=512
        )
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8)  # a trained model's tokens listen to each other
        model.config.auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
        model.save_pretrained(folder)
        written = (folder / "config.json").read_text()
        (folder / "config.json").write_text(written.replace('"model_type": "llama"', '"model_type": "own"'))
        (folder / "own.py").write_text(OWN_CODE.format(is_causal=is_causal))
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(recipes_folder / "tiny" / name, folder)
        return folder

    return make


def test_own_code_that_looks_ahead_is_found_out_by_its_weights(tiny, own_model):
    with pytest.raises(ModelError, match="changing the last token changes the loss of earlier tokens"):
        train(tiny(*ONE_STEP, f"model={own_model(is_causal=False)}", "model.trust_remote_code=true"))


def test_own_code_that_does_not_look_ahead_trains(tiny, own_model):
    recipe = tiny(*ONE_STEP, f"model={own_model(is_causal=True)}", "model.trust_remote_code=true")
    finished = train(recipe).model_folder
    loaded = AutoModelForCausalLM.from_pretrained(finished, trust_remote_code=True)
    assert type(loaded).__name__ == "OwnForCausalLM"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config, part",
    [
        (
            MambaConfig(vocab_size=512, hidden_size=32, num_hidden_layers=1, state_size=8),
            r"mixer\.x_proj \(Linear\)",
        ),
        (  # its convolution reaches back two tokens, which change the loss by less than rounding
            Lfm2Config(
                vocab_size=512,
                hidden_size=32,
                intermediate_size=48,
                num_attention_heads=2,
                num_key_value_heads=1,
                layer_types=["conv", "full_attention"],
                num_hidden_layers=2,
            ),
            r"conv\.out_proj \(Linear\)",
        ),
        (  # its convolution hardly changes queries, and half of a token's values are those of the one before
            ZayaConfig(
                vocab_size=512,
                hidden_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=16,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=32,
                router_hidden_size=8,
            ),
            r"self_attn\.qkv_proj \(ZayaCCAProjection\)",
        ),
    ],
    ids=["recurrent state", "short convolution", "delayed values"],
)
def test_a_model_whose_documents_see_one_another_is_not_packed(
    tiny, tmp_path, recipes_folder, config, part, dtype
):
    folder = tmp_path / "model"
    config.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(recipes_folder / "tiny" / name, folder)
    settings = (f"model={folder}", "training.max_steps=1", "training.save_steps=null", f"model.dtype={dtype}")
    message = rf"change the loss of its second.*, first in .*{part}\. Set data\.packing=false"
    with pytest.raises(ModelError, match=message):
        train(tiny(*settings, "data.packing=true"))


@pytest.mark.parametrize("use", [train, estimate_memory])
def test_an_encoder_is_refused_wherever_a_model_is_named(tiny, tmp_path, use):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertConfig(**sizes).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="is of type 'bert', an encoder"):
        use(tiny(f"model={tmp_path / 'bert'}", output_dir=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_model_folder_without_a_tokenizer_is_refused(tiny, tmp_path):
    """transformers makes one up for it, with the special tokens of its model type alone."""
    OPTConfig(vocab_size=512, hidden_size=32, num_attention_heads=2).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"holds no tokenizer\.json.*Set model\.tokenizer_name_or_path"):
        train(tiny(f"model={tmp_path / 'model'}"))
