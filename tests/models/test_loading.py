"""Models from folders and GGUF files, and what is said when there is none."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILY_SIZES, model_of
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, MixtralConfig, T5Config

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import load_model_config, max_positions
from lowmem_ft.models.loading import load_model
from lowmem_ft.models.tokenizer import load_tokenizer

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=97,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(config, **overrides):
    arguments = {"attn_implementation": "sdpa", "device": CPU, "seed": 1} | overrides
    return load_model(config, load_model_config(config), **arguments)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_arrive_at_the_recipes_dtype(folder, dtype):
    model = load(ModelConfig(name_or_path=str(folder), dtype=dtype))
    assert {parameter.dtype for parameter in model.parameters()} == {getattr(torch, dtype)}


def test_auto_keeps_the_checkpoints_own_dtype(folder):
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    assert load(ModelConfig(name_or_path=str(folder), dtype="auto")).dtype == torch.bfloat16


def test_tied_weights_stay_one_tensor(folder):
    model = load(ModelConfig(name_or_path=str(folder)))
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_the_attention_kernel_is_the_one_chosen(folder):
    model = load(ModelConfig(name_or_path=str(folder)), attn_implementation="eager")
    assert model.config._attn_implementation == "eager"


def test_random_weights_depend_on_the_seed_and_on_nothing_else(folder):
    config = ModelConfig(name_or_path=str(folder), weights="random")
    before = torch.get_rng_state()
    first, again, other = load(config), load(config), load(config, seed=2)
    assert torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert torch.equal(before, torch.get_rng_state())


def test_positions_are_read_whatever_the_architecture_calls_them(folder):
    assert max_positions(load_model_config(ModelConfig(name_or_path=str(folder)))) == 128


def test_weights_that_are_missing_are_named_and_not_made_up(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(ModelConfig(name_or_path=str(folder)))


def test_layers_that_the_config_does_not_count_are_no_stump(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(
        ModelError, match=r"have at least 2 layers, and num_hidden_layers of its config\.json is 1"
    ):
        load(ModelConfig(name_or_path=str(folder)))


def test_what_the_files_lack_is_told_once(tmp_path):
    """transformers' own report of it is not, while one of weights that a model does not take is logged."""
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())
    transformers_logger = logging.getLogger("transformers.modeling_utils")
    transformers_logger.addHandler(handler)
    try:
        model_of(MixtralConfig(**FAMILY_SIZES, num_local_experts=4)).save_pretrained(tmp_path)
        weights = load_file(tmp_path / "model.safetensors")
        save_file(weights | {"not_ours": torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
        load(ModelConfig(name_or_path=str(tmp_path)))
        assert ["not_ours" in line for line in logged] == [True]
        for missing, said in (
            (["w3"], r"model\.layers\.0\.mlp\.experts\.gate_up_proj could not be put together"),
            (["w1", "w2", "w3"], r"experts\.down_proj \[3, .*\] instead of \[4, "),
        ):
            names = {f"model.layers.0.block_sparse_moe.experts.3.{name}.weight" for name in missing}
            left = {name: weight for name, weight in weights.items() if name not in names}
            save_file(left, tmp_path / "model.safetensors", {"format": "pt"})
            with pytest.raises(ModelError, match=said):
                load(ModelConfig(name_or_path=str(tmp_path)))
        assert len(logged) == 1
    finally:
        transformers_logger.removeHandler(handler)


def test_a_folder_that_is_no_model_says_what_a_model_folder_holds(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ModelError, match=r"A model folder holds config\.json"):
        load_model_config(ModelConfig(name_or_path=str(tmp_path)))


@pytest.mark.parametrize("name", ["~/nowhere", "nowhere/model.gguf"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(name):
    with pytest.raises(ModelError, match=r"is not a folder|no such file"):
        load_model_config(ModelConfig(name_or_path=name))


def test_a_hub_name_out_of_reach_says_what_to_do_offline():
    with pytest.raises(ModelError, match=r"cannot be reached.*--local-dir"):
        load_model_config(ModelConfig(name_or_path="someone/some-model"))


@pytest.mark.parametrize(
    "raised,advice",
    [
        ("GatedRepoError", "accept"),
        ("RepositoryNotFoundError", "Check the spelling"),
        ("RevisionNotFoundError", "revision"),
    ],
)
def test_what_the_hub_refuses_is_explained(monkeypatch, raised, advice):
    from huggingface_hub import errors
    from transformers import AutoConfig

    # Which package the hub's client gets its responses from depends on its version.
    response = SimpleNamespace(headers={}, request=None)

    def refuse(*args, **kwargs):
        raise OSError("no") from getattr(errors, raised)("no", response=response)

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    with pytest.raises(ModelError, match=advice):
        load_model_config(ModelConfig(name_or_path="a/b"))


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path):
    T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"causal language model.*t5"):
        load_model_config(ModelConfig(name_or_path=str(tmp_path)))


def test_a_model_without_tokenizer_says_where_to_set_one(folder):
    with pytest.raises(ModelError, match=r"model\.tokenizer_name_or_path"):
        load_tokenizer(ModelConfig(name_or_path=str(folder)))


def test_a_gguf_file_is_unpacked_to_plain_weights(folder, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    path = tmp_path / "tiny.gguf"
    _write_gguf(gguf, model, path)
    config = ModelConfig(name_or_path=str(path))
    loaded = load(config)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], weight, msg=name)


def test_a_gguf_file_that_ends_early_is_refused_wherever_it_ends(folder, tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    _write_gguf(gguf, AutoModelForCausalLM.from_pretrained(folder), path)
    whole = path.read_bytes()
    for num_bytes in (0, 3, 14, 40, 400, len(whole) // 4, len(whole) // 2, len(whole) - 500):
        path.write_bytes(whole[:num_bytes])
        with pytest.raises(ModelError, match=r"tiny\.gguf"):
            load(ModelConfig(name_or_path=str(path)))


def test_a_weight_of_a_gguf_file_that_is_not_finite_is_named(folder, tmp_path):
    gguf = pytest.importorskip("gguf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    weight = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    weight.data[0, 0] = float("nan")
    path = tmp_path / "tiny.gguf"
    _write_gguf(gguf, model, path)
    with pytest.raises(ModelError, match=r"tiny\.gguf.*NaN.* in model\.layers\.1\.mlp\.up_proj\.weight\."):
        load(ModelConfig(name_or_path=str(path)))


def _write_gguf(gguf, model, path):
    """The tiny Llama as an unquantised GGUF, by the names and the rotary permutation that llama.cpp uses."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{index}" for index in range(config.vocab_size)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = weight.view(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_weights_are_a_copy_that_rewriting_the_file_cannot_reach(folder):
    """Mapped pages would change, or vanish, under a running training."""
    model = load(ModelConfig(name_or_path=str(folder)))
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_shards_and_the_checkpoints_own_generation_settings_are_read(folder):
    from transformers import GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=5)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    assert (folder / "model.safetensors.index.json").exists()
    loaded = load(ModelConfig(name_or_path=str(folder)))
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in loaded.state_dict().items())
    assert loaded.generation_config.temperature == 0.7
    assert loaded.name_or_path == str(folder)


def test_weights_of_other_shapes_are_named_with_both(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 48}))
    with pytest.raises(ModelError, match=r"mlp\.down_proj\.weight \[32, 64\] instead of \[32, 48\]"):
        load(ModelConfig(name_or_path=str(folder)))


def test_an_unknown_architecture_asks_for_a_newer_transformers(folder):
    (folder / "config.json").write_text('{"model_type": "quxx"}')
    with pytest.raises(ModelError, match=r"does not know.*pip install -U transformers"):
        load_model_config(ModelConfig(name_or_path=str(folder)))


def test_a_local_model_may_take_its_tokenizer_from_the_hub(folder, monkeypatch):
    seen = {}
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "recipes" / "tiny")
    monkeypatch.setattr("lowmem_ft.models.files.sources.hub_is_reachable", lambda: True)
    monkeypatch.setattr(
        "lowmem_ft.models.tokenizer.AutoTokenizer.from_pretrained",
        lambda path, **source: seen.update(source) or tokenizer,
    )
    load_tokenizer(ModelConfig(name_or_path=str(folder), tokenizer_name_or_path="some/tokenizer"))
    assert seen == {"local_files_only": False, "trust_remote_code": False}
