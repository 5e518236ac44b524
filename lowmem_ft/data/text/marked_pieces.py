"""The text of tokens, in pieces that are learnt or not. Axes: T tokens of one example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lowmem_ft.foundation.system.visible import visible

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Piece:
    """Consecutive text that is learnt, or that is not.

    It is safe to show (:func:`~lowmem_ft.foundation.system.visible.visible`).
    """

    text: str
    is_learnt: bool


def marked_pieces(
    input_ids_T: np.ndarray, is_learnt_T: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> list[Piece]:
    """Return the text of tokens, special tokens included, split where learning begins or ends.

    A piece is what the text grows by: decoded alone, some tokenizers would take the blank at its beginning away.

    Args:
        input_ids_T: token ids.
        is_learnt_T: whether each is learnt.
        tokenizer: decodes them.
    """
    ends = [*(np.flatnonzero(np.diff(is_learnt_T)) + 1).tolist(), len(input_ids_T)]
    pieces, start, before = [], 0, ""
    for end in ends if len(input_ids_T) else []:
        text = str(tokenizer.decode(input_ids_T[:end].tolist()))
        # A character cut in two by the border ends as a replacement, and becomes whole with the next piece.
        grown = (
            text[len(before) :] if text.startswith(before) else _decoded(input_ids_T[start:end], tokenizer)
        )
        pieces.append(Piece(visible(grown), bool(is_learnt_T[start])))
        start, before = end, text
    return pieces


def _decoded(input_ids_T: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(input_ids_T.tolist()))
