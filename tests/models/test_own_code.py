"""Python code that a model's folder brings runs where model.trust_remote_code=true says so, and nowhere else."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.user_paths import recipes_folder
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.tokenizer import load_tokenizer

OWN_CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({trace!r}).touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
MODEL = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
CONFIG_AND_MODEL = {"AutoConfig": "own.OwnConfig", **MODEL}


@pytest.fixture
def trace(tmp_path):
    """The file that the code leaves where it has run."""
    return tmp_path / "it ran"


@pytest.fixture
def folder(tmp_path, trace):
    """Makes a model folder with code of its own for what its config says it has."""

    def make(auto_map, **config):
        made = tmp_path / "model"
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=512, **sizes)).save_pretrained(made)
        shutil.copytree(
            recipes_folder() / "tiny", made, dirs_exist_ok=True, ignore=lambda *_: ["config.json"]
        )
        written = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(written | {"auto_map": auto_map} | config))
        (made / "own.py").write_text(OWN_CODE.format(trace=str(trace)))
        return made

    return make


def load(config):
    cpu = torch.device("cpu")
    return load_model(config, load_model_config(config), attn_implementation="sdpa", device=cpu, seed=0)


@pytest.mark.parametrize(
    "auto_map,model_type",
    [(CONFIG_AND_MODEL, "own"), (CONFIG_AND_MODEL, "vit"), (MODEL, "vit"), (MODEL, "own")],
)
def test_code_of_a_models_own_is_refused_before_it_runs(folder, trace, auto_map, model_type):
    config = ModelConfig(name_or_path=str(folder(auto_map, model_type=model_type)))
    with pytest.raises(ModelError, match=r"own Python code.*model.trust_remote_code=true|does not know"):
        load(config)
    assert not trace.exists()


def test_code_that_stands_in_for_a_known_architecture_is_left_alone(folder, trace):
    load(ModelConfig(name_or_path=str(folder(CONFIG_AND_MODEL))))
    assert not trace.exists()


def test_code_of_a_tokenizer_from_elsewhere_is_refused_without_asking_on_the_terminal(
    folder, trace, monkeypatch
):
    made = folder({})
    (made / "tokenizer_config.json").write_text(
        json.dumps(
            {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
        )
    )
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    with pytest.raises(ModelError, match="No tokenizer could be read"):
        load_tokenizer(ModelConfig(name_or_path=str(made), tokenizer_name_or_path=str(made)))
    assert not trace.exists()


def test_code_that_is_trusted_runs_and_that_is_said(folder, trace, caplog):
    made = folder(CONFIG_AND_MODEL, model_type="own")
    with caplog.at_level(logging.WARNING):
        load(ModelConfig(name_or_path=str(made), trust_remote_code=True))
    assert trace.exists()
    assert f"Python code from {made} runs with your rights" in caplog.text
