"""Loading of the examples that a run can train on, from its ``DataConfig``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.mapped_data import mapped_data
from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.data.streamed_data import streamed_data
from lowmem_ft.data.text.chat_templates import prepare_tokenizer
from lowmem_ft.data.text.no_tokenizer import NoTokenizer
from lowmem_ft.data.text.summary import LengthLimits
from lowmem_ft.data.tokenized_parts import TokenizedParts
from lowmem_ft.foundation.errors import DataError, raise_problems
from lowmem_ft.foundation.system.launch_variables import is_main_process


def load_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int | None,
    seed: int,
    attn_implementation: str,
    vocab_size: int | None = None,
    end_token_ids: Collection[int] | None = None,
) -> PreparedData:
    """Load tokenized training and held-out data, memory-mapped from the cache of ``datasets`` or streamed.

    With several processes, let the first one call it before the others: it tokenizes, they find the result
    in the cache.

    Args:
        config: the recipe's ``data``.
        tokenizer: changed in place if it lacks a pad token or a chat template, so that these are saved with it; a
            :class:`NoTokenizer` does for rows that are tokens.
        max_positions: longest input of the model in tokens, or None if it has no limit.
        seed: chooses the held-out examples of ``data.eval_size``.
        attn_implementation: the model's attention; it decides how packed rows are laid out.
        vocab_size: rows of the model's embedding, which no token id may exceed; None: not checked.
        end_token_ids: tokens at which the model's generation stops, in addition to the EOS; None: unknown.

    Returns:
        The data. It logs the examples left out, cut and learnt, and one example as the model reads it.

    Raises:
        DataError: if the configuration, the source, an example or the tokenizer is unfit, or nothing is left to learn.
    """
    if not config.is_named:
        raise DataError("data.path names the training data, got null. Set data=FILE or data=HUB_NAME.")
    raise_problems(config.problems(), DataError)
    config = replace(config, max_length=_max_length(config, max_positions))
    limits = LengthLimits(max_length=config.max_length, of_model=max_positions)
    if not is_main_process():
        datasets.disable_progress_bars()
    if not isinstance(tokenizer, NoTokenizer):
        prepare_tokenizer(tokenizer, chat_template=config.chat_template)
    pad_token_id: Any = tokenizer.pad_token_id
    if vocab_size is not None and pad_token_id >= vocab_size:
        raise DataError(
            f"The pad token {tokenizer.pad_token!r} has the id {pad_token_id}, but the model has embeddings for ids "
            f"below {vocab_size} only. Set pad_token in its tokenizer_config.json to another token, such as the EOS."
        )
    collate = Collator(
        pad_token_id=pad_token_id,
        max_length=config.max_length,
        packed=config.packing,
        in_one_row="flash" in attn_implementation,
    )
    tokenized = TokenizedParts(config, tokenizer, vocab_size, limits, end_token_ids)
    return streamed_data(tokenized, collate) if config.streaming else mapped_data(tokenized, collate, seed)


def _max_length(config: DataConfig, max_positions: int | None) -> int | None:
    if config.max_length is None:
        if max_positions is None and config.packing:
            raise DataError(
                "data.packing needs a row length, but data.max_length is null and the model has no limit. Set "
                "data.max_length."
            )
        return max_positions
    config.refuse_positions(max_positions)
    return config.max_length
