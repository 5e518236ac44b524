"""Counts of the data on its way to the model: read, left out and why, cut, learnt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

from lowmem_ft.data.row import IGNORED_LABEL, LENGTH_MULTIPLE, TokenizedExample
from lowmem_ft.data.text.marked_pieces import marked_pieces
from lowmem_ft.data.text.unused_fields import UnusedField, fields_of
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.units import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MUCH_UNKNOWN = 0.1
"""Share of unknown tokens that is worth a warning; names and emoji make up a few percent of good data."""


MUCH_LOST = 0.05
"""Share of the examples that may be left out, or lose part of what they teach, without a warning."""

COVERED = 0.95
"""Share of the examples that the suggested ``data.max_length`` holds whole."""


class Outcome(IntEnum):
    """The fate of one tokenized example, stored with it."""

    KEPT = 0
    EMPTY = 1
    NO_ANSWER = 2
    ANSWER_CUT_OFF = 3
    OTHER_FORMAT = 4

    def __str__(self) -> str:
        return {
            Outcome.KEPT: "kept",
            Outcome.EMPTY: "a field is empty",
            Outcome.NO_ANSWER: "no answer to learn",
            Outcome.ANSWER_CUT_OFF: "no label left within data.max_length",
            Outcome.OTHER_FORMAT: "columns of another format (write the rows of each format to a file of their own, "
            "and name both, as in data.path=a.jsonl,b.jsonl)",
        }[self]


@dataclass(frozen=True, kw_only=True)
class LengthLimits:
    """Limits that cut an example: the recipe's ``max_length``, within the model's longest input; None: no limit."""

    max_length: int | None
    of_model: int | None


@dataclass(frozen=True, kw_only=True)
class DataSummary:
    """Counts over the examples read.

    Args:
        outcomes: examples by outcome; for text, the pieces that it was split into.
        num_cut: examples that lost tokens to ``max_length``; for text, documents that were split.
        num_answers_cut: examples that lost tokens to be learnt.
        whole_lengths: examples by their tokens before anything was cut; for text, pieces.
        num_tokens: tokens kept.
        num_label_tokens: tokens kept that are learnt.
        longest: tokens of the longest example kept.
        unused: examples by fields that they have and that are not used, in the bits of ``unused_fields``.
        num_rows: packed rows, or None without packing.
        row_capacity: tokens that fit in one packed row.
    """

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    num_cut: int = 0
    num_answers_cut: int = 0
    whole_lengths: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0
    num_label_tokens: int = 0
    longest: int = 0
    unused: Counter[int] = field(default_factory=Counter)
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
            num_answers_cut=self.num_answers_cut + other.num_answers_cut,
            whole_lengths=self.whole_lengths + other.whole_lengths,
            num_tokens=self.num_tokens + other.num_tokens,
            num_label_tokens=self.num_label_tokens + other.num_label_tokens,
            longest=max(self.longest, other.longest),
            unused=self.unused + other.unused,
        )

    def log(self, source: str, limits: LengthLimits, *, warn: bool = True) -> None:
        """Log the counts, a line each, omitting what did not happen; warn about large losses if wanted."""
        logger.info("%s: %s", source, self._kept())
        if warn:
            self.warn(source, limits)
        for line in self._harmless():
            logger.info("%s: %s", source, line)

    def warn(self, source: str, limits: LengthLimits) -> bool:
        """Warn about unused fields and large losses (:data:`MUCH_LOST`); return whether there were any."""
        lost = list(self._not_used())
        lost += [self._left_out(why) for why, count in self.dropped.items() if self._is_much(count)]
        if self._is_much(self.num_answers_cut):
            lost.append(self._answers_cut(limits))
        for line in lost:
            logger.warning("%s: %s", source, line)
        return bool(lost)

    @property
    def num_read(self) -> int:
        """Examples that were read; for text, the pieces."""
        return sum(self.outcomes.values())

    def _is_much(self, count: int) -> bool:
        return count > MUCH_LOST * self.num_read

    def _kept(self) -> str:
        return (
            f"{counted(self.num_examples, 'example')}, {self.num_tokens:,} tokens, {self.num_label_tokens:,} of them "
            f"learnt, longest {self.longest:,}"
        )

    def _not_used(self) -> Iterator[str]:
        counts: Counter[UnusedField] = Counter()
        for bits, count in self.unused.items():
            counts.update(dict.fromkeys(fields_of(bits), count))
        for unused, count in counts.items():
            yield f"{self._share(count)} have {unused}{unused.what_happens}"

    def _harmless(self) -> Iterator[str]:
        yield from (self._left_out(why) for why, count in self.dropped.items() if not self._is_much(count))
        if self.num_cut and not self._is_much(self.num_answers_cut):
            yield f"truncated {self._share(self.num_cut)} at data.max_length"

    @property
    def packed_words(self) -> str:
        """Rows that the examples are packed into, in words."""
        return (
            f"packed into {counted(self.num_rows or 0, 'row')} of {self.row_capacity:,} tokens, "
            f"{self.packing_efficiency:.1%} full, {self.num_examples / max(1, self.num_rows or 0):.1f} documents a row"
        )

    def _left_out(self, why: Outcome) -> str:
        return f"left out {self._share(self.dropped[why])}: {why}"

    def _answers_cut(self, limits: LengthLimits) -> str:
        wanted = _covering_length(self.whole_lengths, COVERED)
        longest = max(self.whole_lengths)
        if limits.of_model is None or wanted <= limits.of_model:
            way_out = f"data.max_length={wanted} keeps {COVERED:.0%} of the examples whole"
        else:
            held = sum(count for length, count in self.whole_lengths.items() if length <= limits.of_model)
            way_out = (
                f"the model takes at most {limits.of_model} tokens, enough for {held / self.num_read:.1%} of the "
                "examples; shorten the other ones"
            )
        return (
            f"data.max_length={limits.max_length} cuts the answers of {self._share(self.num_answers_cut)}, whose ends "
            f"are not learnt; {way_out} (longest: {longest:,})"
        )

    def _share(self, count: int) -> str:
        return f"{count:,} of {self.num_read:,} ({count / self.num_read:.1%})"

    def require_examples(self, source: str) -> None:
        """Raise an error if nothing is left to learn.

        Args:
            source: the origin of the data, for the message.

        Raises:
            DataError: if no example was kept; it says why.
        """
        if self.num_examples:
            return
        reasons = (
            "; ".join(f"{count:,} with {why}" for why, count in self.dropped.items()) or "there is no example"
        )
        covering = ""
        if self.outcomes[Outcome.ANSWER_CUT_OFF]:
            covering = f" ({_covering_length(self.whole_lengths, COVERED)} keeps {COVERED:.0%} of the examples whole)"
        raise DataError(
            f"Nothing is left to learn from {source}: {reasons}. Check the data, data.loss_on and "
            f"data.max_length{covering}."
        )


SUMMARISED = (
    "outcome",
    "is_cut",
    "is_answer_cut",
    "num_tokens",
    "num_label_tokens",
    "num_whole_tokens",
    "unused_fields",
)
"""Columns of tokenized examples that a summary counts."""


def summarise(columns: Mapping[str, Any]) -> DataSummary:
    """Count tokenized examples, including dropped ones (with 0 tokens).

    Args:
        columns: the columns :data:`SUMMARISED`, and possibly others.

    Returns:
        The counts, without packing.
    """
    values = {name: np.asarray(columns[name]) for name in SUMMARISED}
    whole = values["num_whole_tokens"]
    return DataSummary(
        outcomes=Counter({Outcome(value): count for value, count in _counted(values["outcome"])}),
        num_cut=int(values["is_cut"].sum()),
        num_answers_cut=int(values["is_answer_cut"].sum()),
        whole_lengths=Counter(dict(_counted(whole[whole > 0]))),
        num_tokens=int(values["num_tokens"].sum()),
        num_label_tokens=int(values["num_label_tokens"].sum()),
        longest=int(values["num_tokens"].max(initial=0)),
        unused=Counter({bits: count for bits, count in _counted(values["unused_fields"]) if bits}),
    )


def _counted(values: np.ndarray) -> Iterator[tuple[int, int]]:
    found, counts = np.unique(values, return_counts=True)
    yield from zip(found.tolist(), counts.tolist(), strict=True)


def _covering_length(lengths: Counter[int], share: float) -> int:
    """Return the smallest ``data.max_length`` (a multiple of the row padding) that holds a share of examples whole.

    Args:
        lengths: examples by their tokens; at least one.
        share: share of the examples, such as 0.95.

    Returns:
        Tokens.
    """
    ordered = sorted(lengths)
    held = np.cumsum([lengths[length] for length in ordered])
    length = ordered[int(np.searchsorted(held, share * held[-1]))]
    return -(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE


def check_known_tokens(examples: Iterable[TokenizedExample], tokenizer: PreTrainedTokenizerBase) -> None:
    """Check for text that the tokenizer has no tokens for; byte-level tokenizers have one for any.

    Args:
        examples: some of the data.
        tokenizer: the tokenizer that made them.

    Raises:
        DataError: if only the unknown token would be learnt.
    """
    unknown_id: Any = tokenizer.unk_token_id
    if unknown_id in (None, tokenizer.eos_token_id, tokenizer.pad_token_id):
        return  # GPT-2 uses its EOS as the unknown token too, but never needs it as such
    learnt = np.concatenate([example.labels_T[example.labels_T != IGNORED_LABEL] for example in examples])
    text = learnt[(learnt == unknown_id) | ~np.isin(learnt, tokenizer.all_special_ids)]
    share = float(np.mean(text == unknown_id)) if len(text) else 0.0
    if share == 1:
        raise DataError(
            f"The tokenizer has no token for the learnt text: every token is {tokenizer.unk_token!r}. Set "
            "model.tokenizer_name_or_path to the model's own tokenizer, or choose a model for this kind of text."
        )
    if share > MUCH_UNKNOWN:
        logger.warning(
            "%.0f%% of the learnt tokens are %r, the tokenizer's token for unknown text. Check that model and "
            "tokenizer belong together, and are made for this kind of text.",
            100 * share,
            tokenizer.unk_token,
        )


def marked_text(input_ids_T: np.ndarray, labels_T: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return an example as the model reads it, with the learnt parts between ``⟦`` and ``⟧``.

    Args:
        input_ids_T: token ids.
        labels_T: the same, or -100 where not learnt.
        tokenizer: decodes them.

    Returns:
        The text with its special tokens, safe for a terminal; a long text is cut to a thousand characters from each
        end.
    """
    pieces = marked_pieces(input_ids_T, labels_T != IGNORED_LABEL, tokenizer)
    text = "".join(f"⟦{piece.text}⟧" if piece.is_learnt else piece.text for piece in pieces)
    return text if len(text) <= 2000 else f"{text[:1000]} [...] {text[-1000:]}"
