"""The stack of decoder layers is found wherever an architecture keeps it."""

import pytest
import torch
import transformers as hf
from torch import nn
from transformers import AutoModelForCausalLM

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.techniques.modules.decoder_layers import decoder_layers


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
