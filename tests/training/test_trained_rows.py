"""Rows of new tokens trained alone: PEFT's mathematics and files, without its copies of the table."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from measuring.families import FAMILIES
from tiny_models import losses_of_adamw, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

pytest.importorskip("peft")

from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model

from lowmem_ft.foundation.errors import RecipeError, UserError
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.hf.trainers.refusals import problems_of_whole_runs
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.techniques.adapters.config import AdapterConfig
from lowmem_ft.techniques.adapters.lora import enable_lora
from lowmem_ft.techniques.adapters.saved_adapter import add_saved_adapter, merge_adapter
from lowmem_ft.techniques.adapters.trained_rows import trained_rows_of
from lowmem_ft.techniques.loss.chunked_loss import enable_chunked_loss
from lowmem_ft.techniques.loss.config import LossConfig
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.training.export.merging import merge_into_base
from lowmem_ft.training.export.model_source import find_model, forward_recipe
from lowmem_ft.training.export.saved_evaluation import evaluate_saved
from lowmem_ft.training.run.loop import train

ROWS = range(61, 64)
IDS = torch.arange(40).view(2, 20) % 61
IDS[:, 3], IDS[:, 9] = 61, 63
CONFIG = AdapterConfig(name="lora", r=2, target_modules=("q_proj",), train_new_tokens=True)
TOKENS = ("model.add_tokens=[drizzle, quixotic]", "model.add_special_tokens=[<|tool|>]")


def _by_peft(model, tied):
    names = ("embed_tokens",) if tied else ("embed_tokens", "lm_head")
    settings = LoraConfig(
        r=2,
        lora_alpha=32,
        target_modules=["q_proj"],
        trainable_token_indices={name: list(ROWS) for name in names},
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, settings)


@pytest.mark.parametrize("tied", [False, True])
def test_training_equals_pefts_and_vanilla_peft_loads_the_files(tmp_path, tied):
    ours, base = (tiny_llama(tie_word_embeddings=tied) for _ in range(2))
    base.save_pretrained(tmp_path / "base")
    before = base.model.embed_tokens.weight.detach().clone()
    theirs = _by_peft(base, tied)
    lora = enable_lora(ours, CONFIG, base_name=str(tmp_path / "base"), new_rows=ROWS)
    matrices = {name: value for name, value in theirs.named_parameters() if "lora_" in name}
    for name, value in lora.parameters().items():
        if "lora_" in name:
            value.data.copy_(matrices[f"base_model.model.{name}"])
    assert losses_of_adamw(ours, IDS) == pytest.approx(
        losses_of_adamw(theirs, IDS), rel=1e-6
    )  # tied gradients are summed in another order
    table = ours.model.embed_tokens.weight
    assert torch.equal(table[:61], before[:61])
    assert not (table[[61, 63]] == before[[61, 63]]).any()
    (tmp_path / "adapter").mkdir()
    lora.save(tmp_path / "adapter")
    with torch.no_grad():
        wanted = ours.eval()(IDS).logits
    loaded = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter"
    )
    assert torch.equal(loaded(IDS).logits, wanted)
    used = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    add_saved_adapter(used, tmp_path / "adapter")
    assert type(used.lm_head) is torch.nn.Linear
    assert torch.equal(used(IDS).logits, wanted)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    merge_adapter(merged, tmp_path / "adapter", torch.float32)
    torch.testing.assert_close(merged(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    assert (merged.lm_head.weight is merged.model.embed_tokens.weight) == tied
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    fresh = enable_lora(again, CONFIG, new_rows=ROWS)
    fresh.load(tmp_path / "adapter")
    assert torch.equal(again.eval()(IDS).logits, wanted)
    fresh.remove()
    assert [name for name, _ in again.named_parameters()] == [name for name, _ in merged.named_parameters()]
    assert all(one.requires_grad for one in again.parameters())
    assert again.model.embed_tokens(IDS).requires_grad


def test_a_factor_on_the_embedding_is_part_of_the_gradient():
    config = AutoConfig.for_model(model_type="gemma2", **FAMILIES["gemma2"])
    gradients = []
    for rows in (range(config.vocab_size), ROWS):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        if rows == ROWS:
            enable_lora(model, CONFIG, new_rows=rows)
        model(input_ids=IDS, labels=IDS).loss.backward()
        table = model.get_input_embeddings()
        trained = trained_rows_of(table)
        gradients.append(table.weight.grad[61:64] if trained is None else trained.parameter_RH.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_loss_gives_the_same_gradients(tied, tiles, dtype):
    def gradients(chunked):
        model = tiny_llama(dtype, tie_word_embeddings=tied)
        torch.manual_seed(0)
        lora = enable_lora(model, CONFIG, new_rows=ROWS)
        if chunked:
            enable_chunked_loss(model, LossConfig(chunk_tokens=8), TilingConfig(head=tiles))
        model(input_ids=IDS, labels=IDS).loss.backward()
        return {
            name: one.grad.float()
            for name, one in lora.parameters().items()
            if "delta" in name and one.grad is not None
        }

    plain, chunked = gradients(False), gradients(True)
    assert len(plain) == 2 - tied
    for name, gradient in plain.items():
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            chunked[name], gradient, rtol=tolerance, atol=tolerance * gradient.abs().max().item()
        )
        assert gradient.abs().max() > 0


def test_a_step_makes_no_copy_of_the_table():
    def peak_bytes(make):
        model = tiny_llama(vocab_size=20_000)
        make(model)
        with StorageTracker() as tracker:
            model(input_ids=IDS, labels=IDS).loss.backward()
        return tracker.peak_bytes

    def ours(model, **settings):
        enable_chunked_loss(model, LossConfig(chunk_tokens=2))

    def rows_alone(model):
        enable_lora(model, CONFIG, new_rows=ROWS)
        ours(model)

    def adapters_alone(model):
        enable_lora(model, dataclasses.replace(CONFIG, train_new_tokens=False))
        ours(model)

    table_bytes = 20_000 * 32 * 4
    plain = peak_bytes(adapters_alone)
    assert peak_bytes(rows_alone) - plain < table_bytes / 50
    assert peak_bytes(lambda model: _by_peft(model, False)) - plain > 2 * table_bytes


@pytest.mark.parametrize(
    "rows, model, settings, says",
    [
        (range(0), {}, {}, "did not have, got 0. Name some in model.add_tokens"),
        (
            ROWS,
            {},
            {"modules_to_save": ("embed_tokens",)},
            "a part of model.embed_tokens, which adapter.modules",
        ),
        (ROWS, {"dtype": torch.float16}, {}, "those of model.embed_tokens are float16"),
    ],
)
def test_what_cannot_be_trained_alone_says_why_and_leaves_the_model(rows, model, settings, says):
    plain = tiny_llama(**model)
    names = [name for name, _ in plain.named_parameters()]
    with pytest.raises(UserError, match=says):
        enable_lora(plain, dataclasses.replace(CONFIG, **settings), new_rows=rows)
    assert [name for name, _ in plain.named_parameters()] == names


def test_a_head_with_a_bias_is_refused_as_peft_would_leave_it_out():
    model = tiny_llama()
    model.lm_head = torch.nn.Linear(32, 64)
    with pytest.raises(UserError, match=r"a head without a bias.*lm_head has one.*modules_to_save"):
        enable_lora(model, CONFIG, new_rows=ROWS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runs_continue_bit_for_bit_merge_and_evaluate(tiny, metrics, tmp_path, dtype, caplog):
    plain = ("training.max_steps=2", "training.eval_steps=null")
    base = train(tiny(*plain, output_dir=tmp_path / "base")).model_folder
    settings = (
        *(f"model={base}", "model.weights=pretrained", *TOKENS, f"model.dtype={dtype}", "adapter.name=lora"),
        *("adapter.train_new_tokens=true", "training.lr_scheduler_type=constant", "training.logging_steps=1"),
        *("training.max_steps=4", "training.save_steps=2", "training.eval_steps=4"),
    )
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    caplog.set_level("INFO")
    result = train(tiny(*settings, output_dir=whole))
    assert "rows 512 to 514 of model.embed_tokens and lm_head are trained" in caplog.text
    train(tiny(*settings, "training.max_steps=2", output_dir=parted))
    resumed = train(tiny(*settings, "training.resume_from_checkpoint=auto", output_dir=parted))
    assert metrics(parted) == metrics(whole)
    file = "adapter_model.safetensors"
    assert (result.model_folder / file).read_bytes() == (resumed.model_folder / file).read_bytes()
    named = json.loads((result.model_folder / "adapter_config.json").read_text())["trainable_token_indices"]
    assert named == {"model.embed_tokens": [512, 513, 514]}
    merge_into_base(result.model_folder, tmp_path / "merged", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([tokenizer("drizzle <|tool|>quixotic")["input_ids"]])
    loaded = AutoPeftModelForCausalLM.from_pretrained(result.model_folder)  # resizes by the tokenizer
    torch.testing.assert_close(merged(ids).logits, loaded(ids).logits, rtol=1e-4, atol=1e-5)
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in records if "eval_loss" in record]
    source = find_model(str(result.model_folder))
    held_out = evaluate_saved(forward_recipe(source, ["training.use_cpu=true"]), adapter=source.adapter)
    assert held_out.loss == pytest.approx(records[-1]["eval_loss"], rel=1e-3 if dtype == "bfloat16" else 1e-5)


def test_recipes_that_cannot_train_them_alone_are_refused(tiny, tmp_path):
    rows = ("adapter.name=lora", "adapter.train_new_tokens=true")
    with pytest.raises(RecipeError, match=r"trains the rows of new tokens, got model.add_tokens=\[\]"):
        tiny(*rows, output_dir=tmp_path)
    with pytest.raises(RecipeError, match=r"adapter settings need adapter\.name=lora"):
        tiny(*TOKENS, "adapter.train_new_tokens=true", output_dir=tmp_path)
    with pytest.raises(RecipeError, match="has not been shown to work where processes share a model"):
        tiny(*TOKENS, *rows, "distributed.strategy=fsdp2", output_dir=tmp_path)
    with pytest.raises(RecipeError, match=r"on the device, got offload\.parameters=stream\. Set"):
        tiny(*TOKENS, *rows, "offload.parameters=stream", "checkpointing.mode=full", output_dir=tmp_path)


def test_rows_of_a_table_count_once(tiny, tmp_path, caplog):
    caplog.set_level("INFO")
    settings = (*TOKENS, "adapter.name=lora", "training.max_steps=1", "training.eval_steps=null")

    def counted(*others):
        train(tiny(*settings, *others, output_dir=tmp_path / others[0]))
        (line,) = (line for line in caplog.messages if line.endswith("of them trainable."))
        caplog.clear()
        return [int(number.replace(",", "")) for number in re.findall(r"[\d,]*\d", line)]

    total, trained = counted("adapter.train_new_tokens=true")
    all_rows = counted("adapter.modules_to_save=[embed_tokens]")
    assert [total, trained + 512 * 32] == all_rows


def test_a_trainer_is_told_of_pefts_own_key(tiny, tmp_path):
    recipe = tiny(*TOKENS, "adapter.name=lora", "adapter.train_new_tokens=true", output_dir=tmp_path)
    first, *_ = problems_of_whole_runs(recipe)
    assert "adapter.train_new_tokens is for runs" in first
    assert "trainable_token_indices" in first


def test_estimates_count_gradients_and_state_of_these_rows_alone(tiny, tmp_path):
    settings = ("adapter.name=lora", *TOKENS, "training.max_steps=2")

    def estimated(*others):
        return estimate_memory(tiny(*settings, *others, output_dir=tmp_path), "l4")

    rows = estimated("adapter.train_new_tokens=true")
    whole = estimated("adapter.modules_to_save=[embed_tokens]")
    num_frozen = 512 * 32
    assert rows.model.parameters == whole.model.parameters
    assert whole.model.trainable_parameters - rows.model.trainable_parameters == num_frozen
    one, other = (estimate.by_category_at_peak["optimizer_state"] for estimate in (whole, rows))
    assert one - other == pytest.approx(8 * num_frozen, rel=0.01)
