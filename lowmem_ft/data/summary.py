"""What became of the data on its way to the model: read, left out and why, cut, learnt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batch import IGNORED_LABEL
from lowmem_ft.data.row import TokenizedExample
from lowmem_ft.errors import DataError

logger = logging.getLogger(__name__)

MUCH_UNKNOWN = 0.1
"""Share of unknown tokens that is worth a warning; names and emoji make up some percent of good data."""


class Outcome(IntEnum):
    """What became of one tokenized example; stored with it."""

    KEPT = 0
    EMPTY = 1
    NO_ANSWER = 2
    ANSWER_CUT_OFF = 3

    def __str__(self) -> str:
        return {
            Outcome.KEPT: "kept",
            Outcome.EMPTY: "a field is empty",
            Outcome.NO_ANSWER: "no answer to learn",
            Outcome.ANSWER_CUT_OFF: "no label left within data.max_length",
        }[self]


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Counts over the examples read.

    Args:
        outcomes: examples by what became of them; of text, the pieces it was split into.
        num_cut: examples that lost tokens to ``max_length``; of text, documents that were split.
        num_tokens: tokens kept.
        num_label_tokens: tokens kept that are learnt.
        longest: tokens of the longest example kept.
        num_rows: packed rows, or None without packing.
        row_capacity: tokens that fit in one packed row.
    """

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    num_cut: int = 0
    num_tokens: int = 0
    num_label_tokens: int = 0
    longest: int = 0
    num_rows: int | None = None
    row_capacity: int | None = None

    @property
    def num_examples(self) -> int:
        """Examples that are trained on."""
        return self.outcomes[Outcome.KEPT]

    @property
    def dropped(self) -> dict[Outcome, int]:
        """Examples left out, by reason."""
        return {
            outcome: count
            for outcome, count in sorted(self.outcomes.items())
            if outcome is not Outcome.KEPT and count
        }

    @property
    def packing_efficiency(self) -> float | None:
        """Share of the packed rows that is not padding, or None without packing."""
        if not self.num_rows or not self.row_capacity:
            return None
        return self.num_tokens / (self.num_rows * self.row_capacity)

    def __add__(self, other: DataSummary) -> DataSummary:
        return DataSummary(
            outcomes=self.outcomes + other.outcomes,
            num_cut=self.num_cut + other.num_cut,
            num_tokens=self.num_tokens + other.num_tokens,
            num_label_tokens=self.num_label_tokens + other.num_label_tokens,
            longest=max(self.longest, other.longest),
        )

    def lines(self) -> list[str]:
        """The counts for people, a line each; none about what did not happen."""
        read = sum(self.outcomes.values())
        lines = [
            f"{self.num_examples:,} examples, {self.num_tokens:,} tokens, {self.num_label_tokens:,} of them learnt, "
            f"longest {self.longest:,}"
        ]
        lines += [
            f"left out {count:,} of {read:,} ({count / read:.1%}): {why}"
            for why, count in self.dropped.items()
        ]
        if self.num_cut:
            lines.append(f"cut {self.num_cut:,} of {read:,} ({self.num_cut / read:.1%}) at data.max_length")
        efficiency = self.packing_efficiency
        if efficiency is not None:
            lines.append(
                f"packed into {self.num_rows:,} rows of {self.row_capacity:,} tokens, {efficiency:.1%} full"
            )
        return lines

    def require_examples(self, source: str) -> None:
        """Stop where nothing is left to learn.

        Args:
            source: where the data comes from.

        Raises:
            DataError: if no example was kept; it says why.
        """
        if self.num_examples:
            return
        reasons = (
            "; ".join(f"{count:,} with {why}" for why, count in self.dropped.items()) or "no example at all"
        )
        raise DataError(
            f"Nothing is left to learn from {source}: {reasons}. "
            "Look at the data, at data.loss_on and at data.max_length."
        )


def summarise(
    outcomes: Iterable[int], is_cut: Iterable[bool], num_tokens: np.ndarray, num_label_tokens: np.ndarray
) -> DataSummary:
    """The counts over tokenized examples, dropped ones among them (with 0 tokens).

    Args:
        outcomes: an ``Outcome`` for each example.
        is_cut: whether it lost tokens to ``max_length``, or is the first piece of a document that was split.
        num_tokens: tokens of each.
        num_label_tokens: learnt tokens of each.

    Returns:
        The counts, without packing.
    """
    values, counts = np.unique(np.asarray(outcomes), return_counts=True)
    return DataSummary(
        outcomes=Counter(
            {Outcome(int(value)): int(count) for value, count in zip(values, counts, strict=True)}
        ),
        num_cut=int(np.sum(np.asarray(is_cut))),
        num_tokens=int(num_tokens.sum()),
        num_label_tokens=int(num_label_tokens.sum()),
        longest=int(num_tokens.max(initial=0)),
    )


def check_known_tokens(examples: Iterable[TokenizedExample], tokenizer: PreTrainedTokenizerBase) -> None:
    """Look for text that the tokenizer has no tokens for; byte-level tokenizers have one for any.

    Args:
        examples: some of the data.
        tokenizer: it made them.

    Raises:
        DataError: if all that is learnt is the unknown token.
    """
    unknown_id: Any = tokenizer.unk_token_id
    if unknown_id in (None, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return  # GPT-2 calls its EOS unknown too, and never needs it for that
    learnt = np.concatenate([example.labels_T[example.labels_T != IGNORED_LABEL] for example in examples])
    text = learnt[(learnt == unknown_id) | ~np.isin(learnt, tokenizer.all_special_ids)]
    share = float(np.mean(text == unknown_id)) if len(text) else 0.0
    if share == 1:
        raise DataError(
            f"The tokenizer knows no word of what is learnt: every token is {tokenizer.unk_token!r}. Set "
            "model.tokenizer_name_or_path to the model's own tokenizer, or choose a model for this kind of text."
        )
    if share > MUCH_UNKNOWN:
        logger.warning(
            "%.0f %% of the learnt tokens are %r, which the tokenizer has for text it does not know. Check that model "
            "and tokenizer belong together, and are made for this kind of text.",
            100 * share,
            tokenizer.unk_token,
        )


def marked_text(
    input_ids_T: np.ndarray, labels_T: np.ndarray, tokenizer: PreTrainedTokenizerBase, limit: int = 2000
) -> str:
    """An example as the model reads it, the learnt parts between ``⟦`` and ``⟧``.

    Args:
        input_ids_T: token ids.
        labels_T: the same, or -100 where not learnt.
        tokenizer: decodes them.
        limit: characters shown, half from each end.

    Returns:
        The text, special tokens included.
    """
    learnt_T = labels_T != IGNORED_LABEL
    borders = np.flatnonzero(np.diff(learnt_T)) + 1
    pieces = []
    for ids, learnt in zip(np.split(input_ids_T, borders), np.split(learnt_T, borders), strict=True):
        text = str(tokenizer.decode(ids.tolist()))
        pieces.append(f"⟦{text}⟧" if learnt.any() else text)
    text = "".join(pieces)
    return text if len(text) <= limit else f"{text[: limit // 2]} [...] {text[-limit // 2 :]}"
