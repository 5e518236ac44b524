"""Text that the tokenizer has no tokens for."""

from __future__ import annotations

import logging

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowmem_ft.foundation.errors import DataError


@pytest.fixture
def words_tokenizer():
    """Knows two words."""
    vocabulary = {"[UNK]": 0, "[EOS]": 1, "yes": 2, "no": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", eos_token="[EOS]")


@pytest.mark.parametrize("streaming", [False, True])
def test_text_of_nothing_but_unknown_tokens_is_refused(load, write_jsonl, words_tokenizer, streaming):
    path = write_jsonl([{"text": "quite another language"}])
    with pytest.raises(DataError, match=r"every token is '\[UNK\]'.*model\.tokenizer_name_or_path"):
        load(path, tokenizer=words_tokenizer, streaming=streaming)


@pytest.mark.parametrize("text,warned", [("yes no yes what", True), ("yes no " * 20 + "what", False)])
def test_text_with_many_unknown_tokens_is_warned_of(load, write_jsonl, words_tokenizer, caplog, text, warned):
    with caplog.at_level(logging.WARNING, "lowmem_ft"):
        load(write_jsonl([{"text": text}]), tokenizer=words_tokenizer)
    assert ("33% of the learnt tokens are '[UNK]'" in caplog.text) is warned
