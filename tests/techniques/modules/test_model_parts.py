"""The parts of a model are found wherever an architecture keeps them."""

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import AutoModelForCausalLM

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.techniques.modules.model_parts import ModelParts, decoder_layers


def build(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def llama():
    return build(
        hf.LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2
        )
    )


def test_it_is_the_models_own_list():
    model = llama()
    assert decoder_layers(model) is model.model.layers


def test_other_names_for_the_stack():
    gpt2 = build(hf.GPT2Config(vocab_size=64, n_embd=16, n_layer=3, n_head=2, n_positions=16))
    assert decoder_layers(gpt2) is gpt2.transformer.h
    opt = build(
        hf.OPTConfig(vocab_size=64, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, ffn_dim=16)
    )
    assert decoder_layers(opt) is opt.model.decoder.layers


def test_wrappers_are_looked_through():
    peft = pytest.importorskip("peft")
    model = llama()
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert decoder_layers(wrapped) is model.model.layers


def test_a_stack_inside_a_layer_does_not_count():
    model = llama()
    model.model.layers[0].inner = nn.ModuleList([llama().model.layers[0]])
    assert decoder_layers(model) is model.model.layers


def test_two_stacks_are_refused_by_name():
    with torch.device("meta"):
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
        )
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration has 2: encoder.block, decoder.block"):
        decoder_layers(model)


def test_no_stack_is_refused():
    with pytest.raises(ModelError, match="Linear does not have them"):
        decoder_layers(nn.Linear(2, 2))


def test_stacks_of_a_model_that_reads_images_are_named_and_where_one_is_needed_refused():
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    text |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    images = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = hf.Gemma3Config(text_config=text, vision_config={**images, "image_size": 28, "patch_size": 14})
    with torch.device("meta"):
        model = hf.Gemma3ForConditionalGeneration(config)
    parts = ModelParts(model)
    assert parts.stacks_by_kind["language"] is model.model.language_model.layers
    assert parts.stacks_by_kind["vision"] is model.model.vision_tower.encoder.layers
    assert parts.text_layers() is parts.stacks_by_kind["language"]
    assert parts.towers == [parts.stacks_by_kind["vision"]]
    with pytest.raises(ModelError, match=r"Gemma3ForConditionalGeneration has 2: model.vision_tower"):
        parts.layers()


def test_of_two_stacks_of_text_neither_is_the_language_models():
    with torch.device("meta"):
        model = hf.T5ForConditionalGeneration(
            hf.T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2)
        )
    assert list(ModelParts(model).stacks) == ["encoder.block", "decoder.block"]
    assert ModelParts(model).stacks_by_kind == {}
    with pytest.raises(ModelError, match=r"T5ForConditionalGeneration has 2"):
        ModelParts(model).text_layers()


def test_parts_of_parts_are_the_same():
    parts = ModelParts.of(llama())
    assert ModelParts.of(parts) is parts
    assert parts.layers() is parts.text_layers() is parts.model.model.layers
    assert parts.towers == []
    assert parts.head is parts.model.lm_head
    assert parts.embedding is parts.model.model.embed_tokens
