"""The loss of TRL's SFTTrainer in a recipe's terms: the chunk size of our loss that takes as many bytes.

TRL works on tiles of tokens and vocabulary in the type of the products, and writes their gradient into them; ours works
on all logits of some tokens and holds them in float32 next to a copy in that type. Before 1.15, TRL
works on all logits of some tokens, too. Source: TRL 1.16.0, ``kernels/chunked_logprob.py``.
"""

from __future__ import annotations

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.upstream.patches import existing
from lowmem_ft.foundation.upstream.tested import is_before
from lowmem_ft.planning.script_recipes.untranslated import Reading
from lowmem_ft.recipe import Recipe
from lowmem_ft.techniques.loss.config import LossConfig

_OURS_IN_HALF, _OURS_IN_FLOAT32 = 6, 4
"""Bytes per logit in our chunk, as in the recipe's help."""

_COPIES_ON_CPU = 8.25
"""Float32 tiles held at once where TRL has no Triton: five of its own, three of an expression, a mask."""

WORTH_SAYING = 2**20


def _tile_shape() -> tuple[int, int]:
    """Return the tokens and vocabulary of a tile, as the installed TRL has them.

    Raises:
        UpstreamChangedError: if TRL no longer defines them.
    """
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    return existing(chunked_logprob, "TOKEN_CHUNK_SIZE"), existing(utils, "_CHUNKED_LOGPROB_CHUNK_SIZE")


def _tokens_of_a_chunk() -> int:
    """Return the tokens whose logits TRL computes at once before 1.15, for its whole vocabulary."""
    from trl.trainer import sft_trainer

    return existing(sft_trainer, "_CHUNKED_LM_HEAD_CHUNK_SIZE")


def trl_loss(recipe: Recipe, vocabulary: int, reading: Reading) -> LossConfig:
    """Return the loss group of the recipe of an ``SFTTrainer``.

    Args:
        recipe: all the rest of it.
        vocabulary: vocabulary size of the model; 0: not known, if the model is only a name.
        reading: collects a warning about bytes that the chunk does not cover.
    """
    training, most_tokens = recipe.training, recipe.training.per_device_train_batch_size
    most_tokens *= recipe.data.max_length or 1
    if is_before("trl", (1, 15)):
        return LossConfig(chunk_tokens=min(most_tokens, _tokens_of_a_chunk()))
    vocabulary = vocabulary or _tile_shape()[1]
    is_half = training.mixed_precision != "no" or recipe.model.dtype != "float32"
    taken = _bytes_of_trl(most_tokens, vocabulary, is_half=is_half, on_cpu=training.use_cpu)
    of_a_token = vocabulary * (_OURS_IN_HALF if is_half else _OURS_IN_FLOAT32)
    chunk_tokens = max(1, min(most_tokens, round(taken / of_a_token)))
    if (more := taken - chunk_tokens * of_a_token) > WORTH_SAYING:
        reading.warn(
            f"TRL's loss takes {format_bytes(taken)} for a tile of its logits, up to {format_bytes(more)} more than "
            "the estimate counts."
        )
    return LossConfig(chunk_tokens=chunk_tokens)


def _bytes_of_trl(most_tokens: int, vocabulary: int, *, is_half: bool, on_cpu: bool) -> int:
    tile_tokens, tile_vocabulary = _tile_shape()
    tokens = min(most_tokens, tile_tokens)
    tile = tokens * tile_vocabulary * (2 if is_half else 4)  # however small the vocabulary is
    if not on_cpu:
        return tile
    return tile + round((_COPIES_ON_CPU - 1) * 4 * tokens * min(vocabulary, tile_vocabulary))
