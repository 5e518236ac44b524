"""Every architecture of the catalogue, built without weights, has the published number of parameters."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from lowmem_ft.foundation.catalog.model_architectures import (
    Architecture,
    find_architecture,
    load_architectures,
)

ARCHITECTURES = load_architectures()
OF_EXPERTS = [name for name, found in ARCHITECTURES.items() if found.published_active_parameters]


def _built(architecture: Architecture) -> PreTrainedModel:
    config = CONFIG_MAPPING[architecture.config["model_type"]].from_dict(dict(architecture.config))
    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    with torch.device("meta"):
        return (AutoModelForCausalLM if is_causal else AutoModelForImageTextToText).from_config(config)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_built_model_has_the_published_number_of_parameters(name):
    architecture = ARCHITECTURES[name]
    built = sum(parameter.numel() for parameter in _built(architecture).parameters())
    also_counted = sum(architecture.published_also_counts.values())
    assert built + also_counted == architecture.published_parameters
    assert built == architecture.num_parameters


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_the_experts_of_one_token_and_all_else_are_the_published_active_parameters(name):
    architecture = ARCHITECTURES[name]
    model = _built(architecture)
    active = 0.0
    for parameter_name, parameter in model.named_parameters():
        picked = model.config.num_experts_per_tok / len(parameter) if ".experts." in parameter_name else 1
        active += parameter.numel() * picked
    without_embedding = active - model.get_input_embeddings().weight.numel()
    published = architecture.published_active_parameters
    assert pytest.approx(published, rel=0.03) in (active, without_embedding)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_row_is_complete(name):
    architecture = ARCHITECTURES[name]
    assert re.fullmatch(r"[a-z0-9.-]+", name)
    assert all(
        re.fullmatch(r"[\w.-]+/[\w.-]+|gpt2.*", hub_id)
        for hub_id in [architecture.hub_id, *architecture.variants]
    )
    assert architecture.license
    counts = {"published_parameters"} | ({"published_active_parameters"} if name in OF_EXPERTS else set())
    assert architecture.sources.keys() == counts | {"config"}
    assert {"architectures", "model_type"} <= architecture.config.keys()
    assert architecture.text_config["vocab_size"] > 30000
    asks = ("meta-llama/", "google/") if architecture.license != "apache-2.0" else ()
    assert architecture.gated or not architecture.hub_id.startswith(asks)


def test_no_two_rows_answer_to_one_name():
    names = [
        any_name.lower()
        for found in ARCHITECTURES.values()
        for any_name in {found.name, found.hub_id, *found.variants}
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "name",
    ["llama-3.1-8b", "LLAMA-3.1-8B", "meta-llama/Llama-3.1-8B", "meta-llama/llama-3.1-8b-instruct"],
)
def test_a_name_a_hub_id_and_an_instruct_variant_find_the_same_row(name):
    assert find_architecture(name) is ARCHITECTURES["llama-3.1-8b"]


def test_an_unknown_model_is_none():
    assert find_architecture("llama-9") is None
    assert find_architecture("someone/Llama-3.1-8B") is None


def test_a_variant_has_the_fields_in_which_it_differs():
    qwen = ARCHITECTURES["qwen2.5-7b"]
    assert qwen.config_of("Qwen/Qwen2.5-7B")["max_position_embeddings"] == 131072
    assert qwen.config_of("qwen/qwen2.5-7b-instruct")["max_position_embeddings"] == 32768
    assert qwen.config_of("qwen2.5-7b") == dict(qwen.config)
