"""New tokens of a model: in its tokenizer, and as rows of its embedding and head."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from lowmem_ft.foundation.errors import ModelError, UserError
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.other_parts import other_parts

logger = logging.getLogger(__name__)

_ATTRIBUTE = "lowmem_ft_new_rows"


def with_new_rows(hf_config: PretrainedConfig, config: ModelConfig) -> PretrainedConfig:
    """Return an architecture with a row for each new token, for estimates, which know no tokenizer.

    A run adds fewer where the tokenizer has a token already, or the embedding has rows to spare.
    """
    if not config.new_tokens:
        return hf_config
    hf_config = copy.deepcopy(hf_config)
    text: Any = hf_config.get_text_config()
    text.vocab_size += len(config.new_tokens)
    return hf_config


def set_new_rows(model: nn.Module, rows: range) -> None:
    """Remember with a model the rows of its new tokens."""
    vars(model)[_ATTRIBUTE] = rows


def new_rows(model: nn.Module) -> range:
    """Return the rows of a model's new tokens, in its embedding and head."""
    return vars(model).get(_ATTRIBUTE, range(0))


def resize_embeddings(model: PreTrainedModel, num_tokens: int, seed: int, name: str) -> None:
    """Give a model's embedding and head a row for each token, if they have fewer.

    New rows are drawn as transformers does by default: around the mean of all others, with their covariance (Hewitt,
    "Initializing New Word Embeddings for Pretrained Language Models", 2021).

    Args:
        model: with its weights.
        num_tokens: tokens of the tokenizer.
        seed: seed of the new rows; on one device, the same seed draws the same rows.
        name: the model's, for the message.

    Raises:
        ModelError: if the model has several parts, whose sizes are in a config that is copied as it is.
    """
    num_rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[union-attr]
    if num_tokens <= num_rows:
        return
    if other_parts(model) is not None:
        raise ModelError(
            f"model.add_tokens needs a text-only model, but {name} has several parts. Use tokens that its "
            "tokenizer has, or train its language model saved by itself."
        )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model.resize_token_embeddings(num_tokens)
    logger.info("New tokens: the embedding has %d rows now, in place of %d.", num_tokens, num_rows)


def refuse_untrained_rows(model: PreTrainedModel, config: ModelConfig, *, trained_alone: bool) -> None:
    """Refuse to freeze the rows of new tokens, which mean nothing before they are trained.

    Args:
        model: with its adapters.
        config: names the tokens.
        trained_alone: whether these rows are trained, and no others.

    Raises:
        UserError: if the embedding or the head is frozen.
    """
    if not config.new_tokens or trained_alone:
        return
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    frozen = [
        name
        for end in ends
        for name, module in model.named_modules()
        if module is end and not module.weight.requires_grad  # type: ignore[union-attr]
    ]
    if frozen:
        raise UserError(
            f"model.add_tokens=[{', '.join(config.new_tokens)}] makes rows that would stay untrained, as "
            f"adapter.name=lora freezes {' and '.join(frozen)}. Set adapter.train_new_tokens=true, "
            f"or add {', '.join(frozen)} to adapter.modules_to_save, or train all weights with adapter.name=none."
        )
