"""Micro-batches: shapes, padding, positions; packing changes no loss."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.modeling_flash_attention_utils import _is_packed_sequence

from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.row import TokenizedExample

VOCABULARY = 50


def example(sample_id, length, num_prompt_tokens=1):
    ids = np.random.default_rng(sample_id).integers(1, VOCABULARY, length)
    return TokenizedExample(sample_id, ids, np.where(np.arange(length) < num_prompt_tokens, -100, ids))


def llama():
    return LlamaForCausalLM, LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
    )


def gpt2():
    return GPT2LMHeadModel, GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=64,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )


def loss_sum(model, batch):
    logits = model(**batch.model_inputs(), use_cache=False).logits[:, :-1].reshape(-1, VOCABULARY)
    return torch.nn.functional.cross_entropy(
        logits, batch.labels_BT[:, 1:].reshape(-1), ignore_index=-100, reduction="sum"
    )


@pytest.mark.parametrize("family", [llama, gpt2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_examples_have_the_losses_they_have_alone(family, attention):
    torch.manual_seed(0)
    model_class, config = family()
    config._attn_implementation = attention
    model = model_class(config).train()
    examples = [example(i, length, num_prompt_tokens=3) for i, length in enumerate((9, 5, 14, 4, 11))]
    alone = Collator(pad_token_id=0, max_length=64)
    packed = Collator(pad_token_id=0, max_length=64, packed=True)
    separate = sum(loss_sum(model, alone([[each]])) for each in examples)
    together = loss_sum(model, packed([examples[:3], examples[3:]]))
    assert together.item() == pytest.approx(separate.item(), rel=1e-5)
    contaminated = packed([examples[:3], examples[3:]]).model_inputs() | {"position_ids": None}
    logits = model(
        **contaminated, use_cache=False
    ).logits  # what goes wrong without positions is visible here
    assert not torch.allclose(
        logits[0, 9:], model(**packed([examples[:3]]).model_inputs()).logits[0, 9:], atol=1e-3
    )


def test_rows_are_padded_on_the_right_to_a_multiple_of_eight():
    batch = Collator(pad_token_id=7, max_length=64)([[example(3, 9)], [example(4, 5)]])
    assert batch.input_ids_BT.shape == batch.labels_BT.shape == (2, 16)
    assert batch.input_ids_BT.dtype == batch.labels_BT.dtype == torch.int64
    assert (batch.input_ids_BT[0, 9:] == 7).all()
    assert (batch.labels_BT[1, 5:] == -100).all()
    assert (batch.labels_BT[:, 0] == -100).all()
    assert batch.position_ids_BT is None
    assert (batch.sample_ids, batch.num_tokens, batch.num_label_tokens) == ((3, 4), 14, 12)


def test_padding_does_not_go_beyond_max_length():
    assert Collator(pad_token_id=0, max_length=10)([[example(0, 9)]]).input_ids_BT.shape == (1, 10)


def test_positions_restart_with_every_document_and_with_the_padding():
    batch = Collator(pad_token_id=0, max_length=64, packed=True)(
        [[example(0, 3), example(1, 2)], [example(2, 8)]]
    )
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))]
    assert batch.labels_BT[0, 3] == -100
    assert batch.sample_ids == (0, 1, 2)


def test_flash_attention_gets_one_row_in_which_it_finds_the_documents():
    collate = Collator(pad_token_id=0, max_length=8, packed=True, in_one_row=True)
    batch = collate([[example(0, 5), example(1, 3)], [example(2, 7)]])
    assert batch.input_ids_BT.shape == (1, 16)
    assert batch.position_ids_BT.tolist() == [[*range(5), *range(3), *range(7), 0]]
    assert _is_packed_sequence(batch.position_ids_BT, batch_size=1)


@pytest.mark.parametrize("attention", ["flash_attention_2", "sdpa"])
def test_the_attention_decides_how_packed_rows_are_laid_out(write_jsonl, load, attention):
    path = write_jsonl([{"text": "one two three four"}] * 8)
    data = load(path, packing=True, max_length=16, attn_implementation=attention)
    batch = data.collate([data.train.read(0), data.train.read(1)])
    assert batch.input_ids_BT.shape[0] == (1 if "flash" in attention else 2)


def test_rows_that_are_not_to_be_learnt_keep_their_shape():
    collate = Collator(pad_token_id=0, max_length=64)
    learnt, empty = collate([[example(0, 9)]]), collate([[example(0, 9)]], learn=False)
    assert torch.equal(learnt.input_ids_BT, empty.input_ids_BT)
    assert (empty.labels_BT == -100).all()
    assert (empty.sample_ids, empty.num_tokens, empty.num_label_tokens) == ((), 0, 0)
