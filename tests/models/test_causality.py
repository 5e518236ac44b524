"""Encoders are refused by what their architecture does, not by their name."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.causality import refuse_bidirectional
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.model_files import ENCODERS
from lowmem_ft.models.hf_config import load_model_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
XLM_SIZES = {"vocab_size": 64, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 32}
XLNET_SIZES = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
CPMANT_SIZES = SIZES | {"dim_head": 8, "dim_ff": 64, "prompt_length": 4, "prompt_types": 4}
GEMMA_SIZES = SIZES | {"num_key_value_heads": 4, "head_dim": 8}


def later_tokens_matter(hf_config) -> bool:
    """Whether the logits of a tiny random model change before the token that is changed."""
    model = AutoModelForCausalLM.from_config(hf_config).eval()
    ids = torch.arange(5, 13)[None]
    others = ids.clone()
    others[0, -1] = 40
    with torch.no_grad():
        logits, other_logits = model(input_ids=ids).logits, model(input_ids=others).logits
    return not torch.allclose(logits[:, :-1], other_logits[:, :-1], atol=1e-6)


@pytest.mark.parametrize("model_type", sorted(ENCODERS))
def test_what_is_told_of_a_name_before_the_imports_is_what_the_architecture_says(model_type):
    hf_config = AutoConfig.for_model(model_type)
    if type(hf_config) in AutoModelForCausalLM._model_mapping:
        with pytest.raises(ModelError, match="an encoder"):
            refuse_bidirectional("it", hf_config)


@pytest.mark.parametrize(
    "model_type,fields",
    [
        ("bert", SIZES),
        ("bert", SIZES | {"is_decoder": True}),
        ("roberta", SIZES),
        ("electra", SIZES),
        ("xlm-roberta", SIZES),
        ("megatron-bert", SIZES),
        ("bert-generation", SIZES),
        ("bert-generation", SIZES | {"is_decoder": True}),
        ("xlm", XLM_SIZES),
        ("xlm", XLM_SIZES | {"causal": True}),
        ("cpmant", CPMANT_SIZES),
        ("xlnet", XLNET_SIZES),
        ("gpt_neox", SIZES),
        ("llama", SIZES),
        ("llama", SIZES | {"is_causal": False}),
        ("gemma3_text", GEMMA_SIZES),
        ("gemma3_text", GEMMA_SIZES | {"use_bidirectional_attention": True}),
        ("modernbert-decoder", SIZES),
    ],
)
def test_an_architecture_is_refused_exactly_where_later_tokens_matter(model_type, fields):
    special = dict.fromkeys(
        ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0
    )
    hf_config = AutoConfig.for_model(model_type, **fields, **special)
    if later_tokens_matter(hf_config):
        with pytest.raises(ModelError, match="some/model is of type"):
            refuse_bidirectional("some/model", hf_config)
    else:
        refuse_bidirectional("some/model", hf_config)


@pytest.mark.parametrize(
    "model_type,reason",
    [
        ("bert", "is_decoder=true"),
        ("bart", "is_encoder_decoder=true"),
        ("distilbert", "no causal LM"),
        ("modernbert", "no causal LM"),
        ("t5", "no causal LM"),
        ("vit", "no causal LM"),
    ],
)
def test_a_folder_of_another_kind_of_model_is_refused_by_its_config_alone(tmp_path, model_type, reason):
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"needs a causal language model.*{reason}.*Choose a decoder"):
        load_model_config(ModelConfig(name_or_path=str(tmp_path)))
