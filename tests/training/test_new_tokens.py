"""Runs with new tokens: their rows in the weights, in what is saved and in estimates."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_llama
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowmem_ft.foundation.errors import RecipeError, UserError
from lowmem_ft.models.new_tokens import resize_embeddings
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.training.export.merging import merge_into_base
from lowmem_ft.training.run.loop import train

TOKENS = ("model.add_tokens=[drizzle, quixotic]", "model.add_special_tokens=[<|tool|>, <|im_start|>]")
SHORT = ("training.max_steps=4", "training.save_steps=2", "training.eval_steps=4", "training.logging_steps=1")
NEW = 3
"""The tokenizer of the recipe `tiny` has <|im_start|> already."""


def _ids(tokenizer):
    return tokenizer("drizzle <|tool|>quixotic")["input_ids"]


def test_a_full_run_trains_them_goes_on_bit_for_bit_and_from_pretrained_loads_both(
    tiny, metrics, tmp_path, caplog
):
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    settings = (*TOKENS, *SHORT, "training.lr_scheduler_type=constant")
    caplog.set_level("INFO")
    result = train(tiny(*settings, output_dir=whole))
    assert (
        "drizzle, quixotic, <|tool|> added to the tokenizer, which has 515 now; it had the others"
        in caplog.text
    )
    tokenizer = AutoTokenizer.from_pretrained(result.model_folder)
    model = AutoModelForCausalLM.from_pretrained(result.model_folder)
    assert {512, 513, 514} <= set(_ids(tokenizer))
    assert tokenizer.decode(_ids(tokenizer), skip_special_tokens=True).count("tool") == 0
    assert model.config.vocab_size == len(model.model.embed_tokens.weight) == 512 + NEW
    assert model.lm_head.weight is model.model.embed_tokens.weight
    train(tiny(*settings, "training.max_steps=2", output_dir=parted))
    resumed = train(tiny(*settings, "training.resume_from_checkpoint=auto", output_dir=parted))
    assert metrics(parted) == metrics(whole)
    again = AutoModelForCausalLM.from_pretrained(resumed.model_folder)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_new_rows_are_drawn_by_the_seed_around_the_mean():
    def table(seed):
        model = tiny_llama(torch.bfloat16)
        before = torch.get_rng_state()
        resize_embeddings(model, 64 + NEW, seed, "tiny")
        assert torch.equal(torch.get_rng_state(), before)
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == len(model.lm_head.weight) == 64 + NEW
        return model.get_input_embeddings().weight.detach().float()

    one, other = table(0), table(1)
    assert torch.equal(one, table(0))
    assert torch.equal(one[:64], other[:64])
    assert not torch.equal(one[64:], other[64:])
    assert (one[64:] - one[:64].mean(0)).abs().max() < 5 * one[:64].std()


def test_adapters_train_them_with_the_whole_embedding_and_merge(tiny, metrics, tmp_path):
    peft = pytest.importorskip("peft")
    base = train(
        tiny("training.max_steps=2", "training.eval_steps=null", output_dir=tmp_path / "base")
    ).model_folder
    settings = (
        *(f"model={base}", "model.weights=pretrained", *TOKENS, *SHORT, "adapter.name=lora"),
        *("adapter.modules_to_save=[embed_tokens]", "training.lr_scheduler_type=constant"),
    )
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    result = train(tiny(*settings, output_dir=whole))
    train(tiny(*settings, "training.max_steps=2", output_dir=parted))
    train(tiny(*settings, "training.resume_from_checkpoint=auto", output_dir=parted))
    assert metrics(parted) == metrics(whole)
    merge_into_base(result.model_folder, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ids = torch.tensor([_ids(AutoTokenizer.from_pretrained(tmp_path / "merged"))])
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(result.model_folder)  # resizes by the tokenizer
    torch.testing.assert_close(merged(ids).logits, loaded(ids).logits, rtol=1e-4, atol=1e-5)
    assert len(merged.model.embed_tokens.weight) == 512 + NEW


def test_rows_that_would_stay_untrained_are_refused(tiny, tmp_path):
    pytest.importorskip("peft")
    with pytest.raises(RecipeError, match=r"would stay untrained with adapter\.name=lora"):
        tiny(*TOKENS, "adapter.name=lora", output_dir=tmp_path)
    recipe = tiny(*TOKENS, "adapter.name=lora", "adapter.modules_to_save=[model.norm]", output_dir=tmp_path)
    with pytest.raises(
        UserError, match=r"freezes model.embed_tokens and lm_head. Set .*, or add model.embed_tokens, lm_head"
    ):
        train(recipe)
    with pytest.raises(RecipeError, match="each token once, got drizzle twice"):
        tiny("model.add_tokens=[drizzle]", "model.add_special_tokens=[drizzle]", output_dir=tmp_path)
    with pytest.raises(RecipeError, match="has not been shown to work where processes share a model"):
        tiny(*TOKENS, "distributed.strategy=fsdp2", output_dir=tmp_path)


def test_estimates_count_their_rows(tiny, tmp_path):
    plain = estimate_memory(tiny(output_dir=tmp_path), "l4")
    grown = estimate_memory(tiny(*TOKENS, output_dir=tmp_path), "l4")
    assert grown.model.trainable_parameters - plain.model.trainable_parameters == 4 * 32
