"""Adapters: what is trained, what is kept, what is saved, and the plain model afterwards."""

from __future__ import annotations

import json
import logging
from functools import partial

import pytest
import torch
import transformers as hf
from family_sweep.tiny_configs import tiny_config
from safetensors.torch import load_file, save_file
from tiny_models import model_of, tiny_llama
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

import peft

from lowmem_ft.foundation.errors import CheckpointError, UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.adapters.saved_adapter import add_saved_adapter, merge_adapter
from lowmem_ft.techniques.checkpointing import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.loss.chunked_loss import enable_chunked_loss
from lowmem_ft.techniques.loss.config import LossConfig

LAYERS, HIDDEN, RANK = 2, 32, 4
IDS = torch.arange(40).view(2, 20)
KINDS = ({}, {"use_rslora": True}, {"use_dora": True})


tiny_model = partial(tiny_llama, num_key_value_heads=2)


def lora(**options):
    return AdapterConfig(name="lora", r=RANK, **options)


def loss_of(model):
    return model(input_ids=IDS, labels=IDS, use_cache=False).loss


def take_steps(model, parameters, count=3):
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses = []
    for _ in range(count):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_losses_are_those_of_peft_itself(kind):
    ours, theirs = tiny_model(), tiny_model()
    with torch.random.fork_rng():
        adapter = enable_lora(ours, lora(lora_dropout=0.2, **kind))
    with torch.random.fork_rng():
        config = peft.LoraConfig(
            r=RANK,
            lora_alpha=32.0,
            target_modules="all-linear",
            lora_dropout=0.2,
            task_type="CAUSAL_LM",
            **kind,
        )
        wrapped = peft.get_peft_model(theirs, config)
    torch.manual_seed(1)
    losses = take_steps(ours, adapter.parameters().values())
    torch.manual_seed(1)
    assert losses == take_steps(wrapped, [p for p in wrapped.parameters() if p.requires_grad])
    assert losses[2] < losses[0]


def test_only_adapters_are_trained_and_only_they_are_float32():
    model = tiny_model(torch.bfloat16)
    adapter = enable_lora(model, lora())
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == adapter.parameters().keys()
    assert len(trained) == 2 * 7 * LAYERS
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if name not in trained} == {torch.bfloat16}
    start = trained["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert not torch.equal(start, start.bfloat16().float())  # not rounded on the way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_remove_gives_the_plain_model_back(dtype, kind):
    model = tiny_model(dtype)
    model.model.norm.weight.requires_grad_(False)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    modules, attributes = [type(m) for m in model.modules()], set(vars(model))
    before = loss_of(model)
    adapter = enable_lora(model, lora(**kind))
    take_steps(model, adapter.parameters().values())
    assert not torch.equal(loss_of(model), before)
    adapter.remove()
    assert {name: p.requires_grad for name, p in model.named_parameters()} == trained
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert ([type(m) for m in model.modules()], set(vars(model))) == (modules, attributes)
    assert torch.equal(loss_of(model), before)


def test_under_autocast_no_layer_keeps_a_float32_copy_of_its_input(monkeypatch):
    """q, k and v share their input: PEFT's cast would make three copies, which autocast would cast back."""

    def kept_bytes(model):
        hidden = torch.zeros(2, 20, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False), StorageTracker() as tracker:
            output = model.model.layers[0].self_attn.q_proj(hidden)
            kept = tracker.live_bytes
        output.sum().backward()
        return kept, hidden.grad

    spared, plain = tiny_model(torch.bfloat16), tiny_model(torch.bfloat16)
    for model in (spared, plain):
        with torch.random.fork_rng():
            enable_lora(model, lora())
    for module in plain.modules():
        vars(module).pop("_cast_input_dtype", None)
    (ours, our_gradient), (stock, their_gradient) = kept_bytes(spared), kept_bytes(plain)
    assert stock - ours == 2 * 20 * HIDDEN * 2
    assert torch.equal(our_gradient, their_gradient)


@pytest.mark.parametrize("mode", ["full", "none"])
def test_checkpointing_needs_no_gradient_of_the_frozen_embedding(mode):
    plain, model = tiny_model(), tiny_model()
    gradients = []
    for each in (plain, model):
        with torch.random.fork_rng():
            adapter = enable_lora(each, lora())
        for name, parameter in adapter.parameters().items():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.01)
        if each is model:
            enable_checkpointing(each, CheckpointingConfig(mode=mode))
        loss_of(each).backward()
        gradients.append([p.grad for p in adapter.parameters().values()])
    assert all(gradient.abs().sum() > 0 for gradient in gradients[0])
    assert all(map(torch.equal, *gradients))
    assert model.get_input_embeddings().weight.grad is None


def test_the_chunked_loss_makes_no_gradient_for_a_frozen_head():
    model = tiny_model()
    adapter = enable_lora(model, lora())
    expected = loss_of(model)
    with enable_chunked_loss(model, LossConfig(chunk_tokens=8)):
        loss = loss_of(model)
        loss.backward()
    torch.testing.assert_close(loss, expected)
    assert model.lm_head.weight.grad is None
    assert all(p.grad is not None for p in adapter.parameters().values())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_vanilla_peft_loads_what_is_saved(tmp_path, kind):
    tiny_model().save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").train()
    adapter = enable_lora(model, lora(**kind), base_name=str(tmp_path / "base"), base_revision="abc")
    take_steps(model, adapter.parameters().values())
    adapter.save(tmp_path / "adapter")
    assert {file.name for file in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (str(tmp_path / "base"), "abc")
    assert config["target_modules"] == sorted(config["target_modules"])  # the same file in every process
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    model.eval()
    assert torch.equal(loss_of(loaded), loss_of(model))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_saved_adapters_are_loaded_bit_for_bit(tmp_path, kind):
    adapter = enable_lora(tiny_model(), lora(**kind))
    take_steps(adapter.model, adapter.parameters().values())
    adapter.save(tmp_path)
    fresh = enable_lora(tiny_model(), lora(**kind))
    same = {name: torch.equal(p, adapter.parameters()[name]) for name, p in fresh.parameters().items()}
    assert not all(same.values())
    fresh.load(tmp_path)
    assert all(torch.equal(p, adapter.parameters()[name]) for name, p in fresh.parameters().items())


def test_an_adapter_of_another_base_is_not_added_in_part(tmp_path):
    enable_lora(tiny_llama(), lora(), base_name="base").save(tmp_path)
    with pytest.raises(
        UserError, match=r"the model has no layer for .*layers.1.* and 11 more. Name the base model"
    ):
        add_saved_adapter(tiny_llama(num_hidden_layers=1), tmp_path)
    with pytest.raises(UserError, match=r"does not fit LlamaForCausalLM: size mismatch for .*lora_A"):
        add_saved_adapter(tiny_llama(hidden_size=64), tmp_path)
    save_file(
        dict([*load_file(tmp_path / "adapter_model.safetensors").items()][1:]),
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(
        UserError, match=r"does not fit LlamaForCausalLM: adapter_model.safetensors lacks base_model.*\."
    ):
        add_saved_adapter(tiny_llama(), tmp_path)


def test_layers_that_an_adapter_of_less_depth_leaves_out_are_named(tmp_path, caplog):
    enable_lora(tiny_llama(), lora(), base_name="base").save(tmp_path)
    add_saved_adapter(tiny_llama(), tmp_path)
    assert "deeper" not in caplog.text
    add_saved_adapter(tiny_llama(num_hidden_layers=3), tmp_path)
    assert "has nothing for 7 of the model's layers, all of them deeper than its own: model.layers.2." in (
        caplog.text
    )


def test_an_adapter_of_chosen_layers_is_added_without_a_warning(tmp_path, caplog):
    chosen = AdapterConfig(name="lora", r=RANK, target_modules=("layers.1.mlp.up_proj",))
    enable_lora(tiny_llama(), chosen, base_name="base").save(tmp_path)
    add_saved_adapter(tiny_llama(), tmp_path)
    assert not caplog.text


def test_an_adapter_of_another_rank_is_refused(tmp_path):
    enable_lora(tiny_model(), lora()).save(tmp_path)
    other = enable_lora(tiny_model(), AdapterConfig(name="lora", r=RANK + 1))
    with pytest.raises(
        CheckpointError, match=r"does not fit this run's: 28 tensors differ, such as base_model"
    ):
        other.load(tmp_path)


def test_what_was_written_is_read_back(tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    adapter = enable_lora(tiny_model(), lora())
    write = type(adapter.peft_model).save_pretrained

    def damaged(self, folder, **options):
        write(self, folder, **options)
        tensors = load_file(folder / "adapter_model.safetensors")
        tensors[sorted(tensors)[0]][0, 0] += 1
        save_file(tensors, folder / "adapter_model.safetensors")

    monkeypatch.setattr(type(adapter.peft_model), "save_pretrained", damaged)
    with pytest.raises(CheckpointError, match=r"is not the one in memory: 1 tensors differ"):
        adapter.save(tmp_path)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_merging_adds_each_product_in_float32_and_rounds_once(tmp_path, kind):
    model = tiny_model(torch.bfloat16)
    adapter = enable_lora(model, lora(**kind))
    take_steps(model, adapter.parameters().values())
    adapter.save(tmp_path)
    exact, merged = tiny_model(torch.bfloat16).float(), tiny_model(torch.bfloat16)
    wrapped = peft.PeftModel.from_pretrained(exact, tmp_path).merge_and_unload()
    assert merge_adapter(merged, tmp_path, torch.bfloat16) == 7 * LAYERS
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    for name, weight in wrapped.named_parameters():
        assert torch.equal(merged.get_parameter(name), weight.bfloat16()), name
    assert not torch.equal(
        merged.model.layers[0].mlp.up_proj.weight,
        tiny_model(torch.bfloat16).model.layers[0].mlp.up_proj.weight,
    )


def test_chosen_layers_get_adapters_and_others_do_not(caplog):
    model = tiny_model()
    with caplog.at_level(logging.INFO):
        adapter = enable_lora(model, lora(target_modules=("q_proj", "layers.1.mlp.down_proj")))
    names = {name.rpartition(".lora_")[0] for name in adapter.parameters()}
    assert names == {
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
    }
    assert "LoRA of rank 4 on 3 linear layers (down_proj, q_proj)" in caplog.text


def test_names_that_match_no_layer_are_all_named_with_the_nearest():
    with pytest.raises(UserError) as error:
        enable_lora(tiny_model(), lora(target_modules=("q_proj", "upproj", "norm")))
    assert len(error.value.problems) == 2
    assert "has no linear layer 'upproj'. Did you mean `up_proj`" in str(error.value)
    assert "linear layer 'norm'" in str(error.value)


def test_bad_values_explain_themselves_all_at_once():
    with pytest.raises(UserError) as error:
        enable_lora(
            tiny_model(), AdapterConfig(name="lora", r=0, lora_alpha=0, lora_dropout=1, target_modules=())
        )
    assert len(error.value.problems) == 4


def test_gpt2_whose_layers_lie_the_other_way_round(tmp_path):
    torch.manual_seed(0)
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=64, bos_token_id=0, eos_token_id=0)
    config.attn_pdrop = config.resid_pdrop = config.embd_pdrop = 0.0
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base").train()
    adapter = enable_lora(model, lora())
    losses = take_steps(model, adapter.parameters().values())
    assert losses[2] < losses[0]
    adapter.save(tmp_path / "adapter")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merge_adapter(merged, tmp_path / "adapter", torch.float32)
    torch.testing.assert_close(loss_of(merged), loss_of(model))


def tiny_mixture(dtype=torch.float32):
    torch.manual_seed(0)
    config = hf.Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        moe_intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=dtype).train()


def test_fused_experts_are_adapted_saved_and_merged(tmp_path):
    model = tiny_mixture()
    adapter = enable_lora(model, lora(), base_name="base")
    assert any("mlp.experts" in name for name in adapter.parameters())
    assert not any("mlp.gate." in name for name in adapter.parameters())
    take_steps(model, list(adapter.parameters().values()))
    adapter.save(tmp_path)
    torch.testing.assert_close(
        loss_of(peft.PeftModel.from_pretrained(tiny_mixture(), tmp_path)), loss_of(model)
    )
    merged = tiny_mixture()
    merge_adapter(merged, tmp_path, torch.float32)
    torch.testing.assert_close(loss_of(merged), loss_of(model))
    assert not torch.equal(
        merged.model.layers[0].mlp.experts.down_proj, tiny_mixture().model.layers[0].mlp.experts.down_proj
    )


def test_a_router_has_an_adapter_only_if_it_is_named():
    adapter = enable_lora(tiny_mixture(), lora(target_modules=("q_proj", "gate")))
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in adapter.parameters()} == {"q_proj", "gate"}


@pytest.mark.parametrize(
    "kind, left_out, kept",
    [
        ("nemotron_h", {"out_proj"}, {"in_proj"}),
        ("mamba", {"x_proj", "dt_proj", "out_proj"}, {"in_proj"}),
        ("granitemoehybrid", {"out_proj"}, {"in_proj"}),  # of which PEFT's own list does not know
        (
            "gemma3n_text",
            {"correction_coefs"},
            {"prediction_coefs", "0"},
        ),  # clamped; in a list, as layers are
        ("qwen3_next", set(), {"out_proj"}),  # a gated delta net calls its layer
    ],
)
def test_layers_that_a_fused_kernel_reads_get_no_adapter(kind, left_out, kept, caplog):
    with caplog.at_level(logging.INFO):
        adapter = enable_lora(model_of(tiny_config(kind)), lora())
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in adapter.parameters()}
    assert not adapted & left_out
    assert kept <= adapted
    assert ("without calling them" in caplog.text) == bool(left_out)
    if left_out:
        with pytest.raises(UserError, match="reads that weight without calling"):
            enable_lora(model_of(tiny_config(kind)), lora(target_modules=(*kept - {"0"}, *left_out)))


@pytest.mark.parametrize("kind", [{"use_dora": True}, {"lora_dropout": 0.1}], ids=str)
def test_what_peft_cannot_put_beside_experts_leaves_the_model_as_it_was(kind):
    model = tiny_mixture()
    modules, trained = str(model), [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(UserError, match=r"Set adapter\.use_dora=false and adapter\.lora_dropout=0"):
        enable_lora(model, lora(**kind))
    assert str(model) == modules
    assert [parameter.requires_grad for parameter in model.parameters()] == trained
    enable_lora(model, lora(**kind, target_modules=("q_proj", "o_proj")))


def test_without_an_adapter_the_rest_is_a_forgotten_switch():
    assert list(AdapterConfig().problems()) == []
    assert "need adapter.name=lora" in next(AdapterConfig(r=8).problems())
