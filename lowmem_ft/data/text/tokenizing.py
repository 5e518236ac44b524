"""Token ids of examples and the tokens that are learnt, in batches; rows that are tokens already are taken as they are.

Axes: T tokens of one example.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.config import LossOn
from lowmem_ft.data.text.examples import Row, Tokens, naming_example
from lowmem_ft.data.text.formats import ExampleFormat
from lowmem_ft.data.text.masking import MarkedText, mark_learnt
from lowmem_ft.data.text.summary import Outcome
from lowmem_ft.data.text.unused_fields import refuse_images, refuse_judged_answers, unused_fields
from lowmem_ft.foundation.errors import DataError

TOKENIZED = datasets.Features(
    {
        "sample_id": datasets.Value("int64"),
        "input_ids": datasets.List(datasets.Value("int32")),
        "is_learnt": datasets.List(datasets.Value("bool")),
        "num_tokens": datasets.Value("int32"),
        "num_label_tokens": datasets.Value("int32"),
        "num_whole_tokens": datasets.Value("int32"),
        "is_cut": datasets.Value("bool"),
        "is_answer_cut": datasets.Value("bool"),
        "outcome": datasets.Value("int8"),
        "unused_fields": datasets.Value("int32"),
        "digest": datasets.Value("int64"),
        "row_digest": datasets.List(datasets.Value("int64"), length=2),
    }
)
"""Columns of a tokenized example.

``sample_id`` is its index among the rows read; the mask is one bit a token; ``num_whole_tokens`` counts it before it
was cut; ``unused_fields``, of a row's first piece, has a bit for each of ``unused_fields.ALL`` that the row has and
its text has not; ``digest`` is one of its tokens and of the mask, ``row_digest`` one of the row's tokens before they
were cut, in 16 bytes (zeros: a later piece, or an example that is left out).
"""


MOST_CHARS_OF_WORD = 10_000_000
"""Letters and digits in a row that are tokenized: a tokenizer takes minutes and GiB for 50 million."""


@dataclass(frozen=True, kw_only=True)
class Tokenization:
    """Everything that decides what a row becomes; ``Dataset.map`` calls it on batches of rows.

    Args:
        tokenizer: fast, with a chat template if the format needs one.
        example_format: reader of a row.
        loss_on: the tokens to learn.
        max_length: tokens beyond it are cut off, or begin a new piece of a document; None: no limit.
        source: the origin of the rows, for messages.
        vocab_size: rows of the model's embedding; None: not checked.
        blank_is_row: whether a row without text counts as an example, which is left out: a blank line does not.
    """

    tokenizer: PreTrainedTokenizerBase
    example_format: ExampleFormat
    loss_on: LossOn
    max_length: int | None
    source: str
    vocab_size: int | None = None
    blank_is_row: bool = True

    def __call__(self, columns: dict[str, list[Any]], sample_ids: list[int]) -> dict[str, list[Any]]:
        """Return the tokenized columns of a batch of rows; documents that are too long become several rows.

        Args:
            columns: values by column, as ``datasets`` passes them.
            sample_ids: index of each row.

        Returns:
            Values by the column names of ``TOKENIZED``.
        """
        columns = dict(columns)
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        marked = [self._mark(row, sample_id) for row, sample_id in zip(rows, sample_ids, strict=True)]
        unused = [
            unused_fields(self.example_format, row, text.text) if isinstance(text, MarkedText) else 0
            for row, text in zip(rows, marked, strict=True)
        ]
        tokenized: dict[str, list[Any]] = {column: [] for column in TOKENIZED}
        for sample_id, row, text, encoded, bits in zip(
            sample_ids, rows, marked, self._encode(marked), unused, strict=True
        ):
            self._require_embedded(encoded, sample_id)
            for number, piece in enumerate(self._pieces(row, text, encoded)):
                of_row = {"sample_id": sample_id, "unused_fields": 0 if number else bits}
                for column, value in {**of_row, **piece}.items():
                    tokenized[column].append(value)
        return tokenized

    def key(self) -> dict[str, Any]:
        """Return what the result depends on, as plain values: the name of its cache."""
        tokenizer: Any = self.tokenizer
        of_text = {}
        if self.example_format.name != "tokens":
            of_text = {
                "tokenizer": tokenizer.backend_tokenizer.to_str(),
                "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
                "chat_template": str(tokenizer.chat_template),
            }
        return {
            **of_text,
            "example_format": repr(self.example_format),
            "loss_on": self.loss_on,
            "max_length": self.max_length,
            "vocab_size": self.vocab_size,
            "blank_is_row": self.blank_is_row,
            "version": 7,  # increase it when the same values give other tokens
        }

    def _mark(self, row: Row, sample_id: int) -> MarkedText | Tokens | None:
        with naming_example(sample_id, self.source):
            example = self.example_format.read(row)
            if example is None:
                return None
            refuse_images(self.example_format, row)
            refuse_judged_answers(self.example_format, row)
            if isinstance(example, Tokens):
                return example
            marked = mark_learnt(example, self.tokenizer, self.loss_on)
            _refuse_endless_word(marked.text)
            return marked

    def _encode(self, marked: list[MarkedText | Tokens | None]) -> list[tuple[np.ndarray, np.ndarray] | None]:
        """Return token ids and the learnt mask of each text."""
        encoded: list[tuple[np.ndarray, np.ndarray] | None] = [
            (one.input_ids_T, one.is_learnt_T) if isinstance(one, Tokens) else None for one in marked
        ]
        for templated in (True, False):
            chosen, texts = [], []
            for i, text in enumerate(marked):
                if isinstance(text, MarkedText) and text.holds_special_tokens is templated:
                    chosen.append(i)
                    texts.append(text)
            if not chosen:
                continue
            encodings: Any = self.tokenizer(
                [text.text for text in texts],
                add_special_tokens=not templated,
                return_offsets_mapping=True,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,  # "longer than the model's maximum": we cut and count
            )
            both = zip(encodings["input_ids"], encodings["offset_mapping"], strict=True)
            for i, text, (ids, offsets) in zip(chosen, texts, both, strict=True):
                encoded[i] = self._learnt_tokens(text, ids, offsets)
        return encoded

    def _require_embedded(self, encoded: tuple[np.ndarray, np.ndarray] | None, sample_id: int) -> None:
        if encoded is None or self.vocab_size is None:
            return
        largest = int(encoded[0].max(initial=0))
        if largest >= self.vocab_size and self.example_format.name == "tokens":
            raise DataError(
                f"Example {sample_id} of {self.source}: the row has the id {largest}, but the model has embeddings for "
                f"ids below {self.vocab_size} only. Tokenize with the model's own tokenizer, or name the model that "
                "the ids are for."
            )
        if largest >= self.vocab_size:
            token = self.tokenizer.convert_ids_to_tokens(largest)
            raise DataError(
                f"Example {sample_id} of {self.source}: the tokenizer gives {token!r} the id {largest}, but the model "
                f"has embeddings for ids below {self.vocab_size} only. Set model.tokenizer_name_or_path to the "
                "model's own tokenizer, or resize the model's embeddings (resize_token_embeddings) and save it."
            )

    def _learnt_tokens(
        self, text: MarkedText, ids: list[int], offsets: list[tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        input_ids_T = np.asarray(ids, dtype=np.int32)
        starts_T, ends_T = np.asarray(offsets, dtype=np.int64).reshape(-1, 2).T
        is_learnt_T = np.zeros(len(ids), dtype=bool)
        for start, end in text.learnt:
            is_learnt_T |= (starts_T < end) & (ends_T > start) & (starts_T < ends_T)
        eos: Any = self.tokenizer.eos_token_id
        if text.holds_special_tokens or eos is None:
            return input_ids_T, is_learnt_T
        if ids and ids[-1] == eos:  # the tokenizer itself ends every text with EOS
            is_learnt_T[-1] = True
            return input_ids_T, is_learnt_T
        return np.append(input_ids_T, np.int32(eos)), np.append(is_learnt_T, True)

    def _pieces(
        self, row: Row, text: MarkedText | Tokens | None, encoded: tuple[np.ndarray, np.ndarray] | None
    ) -> list[dict[str, Any]]:
        if text is None or encoded is None:
            if self.example_format.is_of_another(row):
                return [_dropped(Outcome.OTHER_FORMAT)]
            return [_dropped(Outcome.EMPTY)] if self.blank_is_row else []
        if isinstance(text, MarkedText) and not text.learnt:
            return [_dropped(Outcome.NO_ANSWER)]
        input_ids_T, is_learnt_T = encoded
        limit = self.max_length or len(input_ids_T)
        if self.example_format.name != "text":
            return [_with_row_digest(_piece(input_ids_T, is_learnt_T, limit), input_ids_T)]
        # A last piece of a single token would have nothing to predict it from.
        starts = range(0, max(len(input_ids_T) - 1, 1), limit)
        pieces = [slice(start, start + limit) for start in starts]
        rows = [_piece(input_ids_T[piece], is_learnt_T[piece], limit) for piece in pieces]
        rows[0]["is_cut"] = len(input_ids_T) > limit  # split, rather: no part of it is lost
        return [_with_row_digest(rows[0], input_ids_T), *rows[1:]]


def _piece(input_ids_T: np.ndarray, is_learnt_T: np.ndarray, limit: int) -> dict[str, Any]:
    """Return one row of ``TOKENIZED`` except its sample id, cut at the limit."""
    num_whole_tokens, is_answer_cut = len(input_ids_T), bool(is_learnt_T[limit:].any())
    is_cut = num_whole_tokens > limit
    input_ids_T, is_learnt_T = input_ids_T[:limit], is_learnt_T[:limit].copy()
    is_learnt_T[:1] = False  # nothing comes before the first token to predict it from
    counts = {"num_whole_tokens": num_whole_tokens, "is_cut": is_cut, "is_answer_cut": is_answer_cut}
    digest = hashlib.blake2b(input_ids_T.tobytes() + is_learnt_T.tobytes(), digest_size=8).digest()
    if not is_learnt_T.any():
        return _dropped(Outcome.ANSWER_CUT_OFF if is_cut else Outcome.NO_ANSWER) | counts
    return {
        "input_ids": input_ids_T,
        "is_learnt": is_learnt_T,
        "num_tokens": len(input_ids_T),
        "num_label_tokens": int(is_learnt_T.sum()),
        "outcome": int(Outcome.KEPT),
        "digest": int.from_bytes(digest, "little", signed=True),
        "row_digest": _NO_DIGEST,
        **counts,
    }


_NO_DIGEST = (0, 0)


def _with_row_digest(piece: dict[str, Any], input_ids_T: np.ndarray) -> dict[str, Any]:
    """Return a row's first piece with the digest of all its tokens, if the piece is kept."""
    if piece["outcome"] != Outcome.KEPT:
        return piece
    digest = hashlib.blake2b(input_ids_T.tobytes(), digest_size=16).digest()
    return {**piece, "row_digest": np.frombuffer(digest, dtype=np.int64)}


def _dropped(outcome: Outcome) -> dict[str, Any]:
    """Return the row of an example that is left out: it keeps the reason, to be counted, but no tokens."""
    return {
        "input_ids": np.zeros(0, dtype=np.int32),
        "is_learnt": np.zeros(0, dtype=bool),
        "num_tokens": 0,
        "num_label_tokens": 0,
        "num_whole_tokens": 0,
        "is_cut": False,
        "is_answer_cut": False,
        "outcome": int(outcome),
        "digest": 0,
        "row_digest": _NO_DIGEST,
    }


def _refuse_endless_word(text: str) -> None:
    if len(text) <= MOST_CHARS_OF_WORD:
        return
    start = 0
    for other in itertools.chain(re.finditer(r"\W", text), [None]):
        end = len(text) if other is None else other.start()
        if end - start > MOST_CHARS_OF_WORD:
            raise DataError(
                f"it holds a word of {end - start:,} characters, beginning with {text[start : start + 20]!r}, and "
                f"words of at most {MOST_CHARS_OF_WORD:,} are tokenized. Leave the row out."
            )
        start = end + 1
