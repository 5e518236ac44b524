"""Architectures without weights: names of the catalogue, and config.json files that lack something."""

from __future__ import annotations

import json
import logging
import math

import pytest

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.hub_names import hub_id_of
from lowmem_ft.models.hf_config import load_model_config, max_positions
from lowmem_ft.models.tokenizer import load_tokenizer

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.fixture
def no_network(monkeypatch):
    """Whoever asks for the hub fails the test."""

    def asked():
        raise AssertionError("the hub was asked for")

    monkeypatch.setattr("lowmem_ft.models.files.sources.hub_is_reachable", asked)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("lowmem_ft.models.files.sources.hub_is_reachable", lambda: False)


def read(tmp_path, fields):
    (tmp_path / "config.json").write_text(fields if isinstance(fields, str) else json.dumps(fields))
    return load_model_config(ModelConfig(name_or_path=str(tmp_path)))


@pytest.mark.parametrize(
    "name", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "Meta-Llama/llama-3.1-8b"]
)
def test_an_estimate_takes_a_gated_architecture_from_the_catalogue(no_network, name):
    hf_config = load_model_config(ModelConfig(name_or_path=name), architecture_only=True)
    assert (hf_config.model_type, hf_config.num_hidden_layers, hf_config.vocab_size) == ("llama", 32, 128256)
    assert hf_config.name_or_path == hub_id_of(name)


def test_a_variants_own_fields_count(no_network):
    def positions(name):
        return max_positions(load_model_config(ModelConfig(name_or_path=name), architecture_only=True))

    assert positions("Qwen/Qwen2.5-7B") == 131072
    assert positions("Qwen/Qwen2.5-7B-Instruct") == 32768


def test_a_local_folder_of_a_catalogue_name_comes_first(tmp_path, monkeypatch, no_network):
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(TINY))
    monkeypatch.chdir(tmp_path)
    hf_config = load_model_config(ModelConfig(name_or_path="gpt2"), architecture_only=True)
    assert hf_config.model_type == "llama"


def test_a_revision_is_asked_of_the_hub(offline):
    with pytest.raises(ModelError, match="cannot be reached"):
        load_model_config(ModelConfig(name_or_path="llama-3.1-8b", revision="abc"), architecture_only=True)


def test_for_training_a_catalogue_name_stands_for_its_hub_id(monkeypatch, offline, caplog):
    asked = []

    def no_config(path, **source):
        asked.append(path)
        raise OSError("no")

    monkeypatch.setattr("lowmem_ft.models.hf_config.AutoConfig.from_pretrained", no_config)
    monkeypatch.setattr("lowmem_ft.models.tokenizer.AutoTokenizer.from_pretrained", no_config)
    config = ModelConfig(name_or_path="qwen2.5-7b", tokenizer_name_or_path="llama-3.1-8b")
    with caplog.at_level(logging.INFO, "lowmem_ft"), pytest.raises(ModelError, match=r"Qwen/Qwen2\.5-7B"):
        load_model_config(config)
    with pytest.raises(ModelError):
        load_tokenizer(config)
    assert asked == ["Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B"]
    assert "model.name_or_path=qwen2.5-7b is the hub's Qwen/Qwen2.5-7B." in caplog.text


@pytest.mark.parametrize(
    "name,near",
    [
        ("llama3.1-8b", "Did you mean `llama-3.1-8b`"),
        ("meta-llama/Llama-3.1-9B", "Did you mean `meta-llama/Llama-3.1-8B`"),
    ],
)
def test_an_unknown_name_without_network_names_the_nearest(offline, name, near):
    with pytest.raises(ModelError, match=rf"{near}.*--local-dir.*lowmem-ft models"):
        load_model_config(ModelConfig(name_or_path=name), architecture_only=True)


def test_a_known_name_is_not_offered_instead_of_itself(offline):
    with pytest.raises(ModelError) as raised:
        load_model_config(ModelConfig(name_or_path="llama-3.1-8b"))
    assert "Did you mean" not in str(raised.value)


def test_a_complete_config_is_read(tmp_path):
    assert read(tmp_path, TINY).hidden_size == 64


@pytest.mark.parametrize("missing", [["hidden_size"], ["num_hidden_layers", "vocab_size"]])
def test_sizes_that_are_missing_are_named_and_not_made_up(tmp_path, missing):
    with pytest.raises(ModelError, match=rf"that of \S*{tmp_path.name} lacks {', '.join(missing)}\."):
        read(tmp_path, {field: value for field, value in TINY.items() if field not in missing})


def test_a_size_may_have_the_name_that_the_architecture_gives_it(tmp_path):
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99}
    assert read(tmp_path, gpt2).num_hidden_layers == 2


def test_a_size_may_have_a_name_of_former_times(tmp_path):
    bloom = {"model_type": "bloom", "n_embed": 128, "n_layer": 3, "num_attention_heads": 4, "vocab_size": 99}
    assert read(tmp_path, bloom).hidden_size == 128


def test_a_config_without_a_model_type_says_so(tmp_path):
    with pytest.raises(ModelError, match="must give model_type"):
        read(tmp_path, {field: value for field, value in TINY.items() if field != "model_type"})


@pytest.mark.parametrize(
    "wrong,named",
    [({"hidden_size": "64"}, "'hidden_size' expected int"), ({"num_attention_heads": 5}, "not a multiple")],
)
def test_a_field_of_the_wrong_kind_is_named(tmp_path, wrong, named):
    with pytest.raises(ModelError, match=rf"is invalid: .*{named}.*Correct the field"):
        read(tmp_path, TINY | wrong)


MIXTRAL = {**TINY, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
DBRX = {"model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 100}


@pytest.mark.parametrize(
    "fields, said",
    [
        ({**MIXTRAL, "num_experts_per_tok": 5}, r"num_local_experts=4, but .* has num_experts_per_tok=5\."),
        ({**MIXTRAL, "num_experts_per_tok": 0}, r"num_experts_per_tok=0\."),
        (
            {**DBRX, "ffn_config": {"moe_num_experts": 4, "moe_top_k": 8}},
            r"moe_num_experts=4, .* moe_top_k=8",
        ),
        (
            {**MIXTRAL, "router_aux_loss_coef": math.nan},
            r"finite and at least 0, .* router_aux_loss_coef=nan",
        ),
        ({**MIXTRAL, "router_aux_loss_coef": -0.1}, r"router_aux_loss_coef=-0\.1.*Correct the field"),
    ],
    ids=["more than all", "none", "DBRX", "NaN", "negative"],
)
def test_routing_that_cannot_be_is_refused_by_its_fields(tmp_path, fields, said):
    with pytest.raises(ModelError, match=said):
        read(tmp_path, fields)


def test_every_problem_of_a_routing_is_told_and_plain_layers_are_none(tmp_path):
    with pytest.raises(ModelError) as error:
        read(tmp_path, {**MIXTRAL, "num_experts_per_tok": 9, "router_aux_loss_coef": -1.0})
    assert len(error.value.problems) == 2
    assert (
        read(tmp_path, {**MIXTRAL, "num_experts_per_tok": 4, "router_aux_loss_coef": 0.0}).num_experts_per_tok
        == 4
    )
    assert read(tmp_path, {**TINY, "model_type": "jamba", "num_experts": 1}).num_experts_per_tok == 2


def test_a_draft_model_is_refused_by_its_name(tmp_path):
    """Its layers read the keys of another model; its text config alone looks like a model to train."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100}
    layers = {"num_hidden_layers": 2, "num_kv_shared_layers": 2}
    layers["layer_types"] = ["sliding_attention", "full_attention"]
    no_inputs = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    text = {"model_type": "gemma4_text", **sizes, **layers, **no_inputs}
    with pytest.raises(
        ModelError, match=r"'gemma4_assistant', a draft model: all of its 2 layers.*=2 in its"
    ):
        read(tmp_path, {"model_type": "gemma4_assistant", "text_config": text})


def test_a_model_with_two_text_configs_is_refused_as_an_encoder_decoder(tmp_path):
    fields = {"text_encoder": {"model_type": "t5"}, "audio_encoder": {"model_type": "encodec"}}
    decoder = {"model_type": "musicgen_decoder"}
    with pytest.raises(ModelError, match=r"is of type 'musicgen', an encoder-decoder"):
        read(tmp_path, {"model_type": "musicgen", **fields, "decoder": decoder})
