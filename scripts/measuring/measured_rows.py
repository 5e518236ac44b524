"""Rows of everything that is measured: random tokens in documents of named lengths, the same for whoever is compared.

What a step takes depends on its rows. Attention costs by the length of documents. And where all tokens are alike, all
rows of every activation matrix are: products of such matrices draw less power, and GPUs then run them at a higher clock
than any real data. Row number k depends on the seed, k, the model's vocabulary and the documents alone, so that it is
the same however rows are cut into micro-batches.

Axes: T tokens of a row, V tokens of a vocabulary.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, PretrainedConfig

from lowmem_ft.data.row import IGNORED_LABEL, Row, TokenizedExample

SEED = 0
_SPECIAL = re.compile(r"_token_(id|ids|index|indices)$")
_NAMED_DOCUMENTS = re.compile(r"([1-9]\d*)x([1-9]\d*)")

Documents = tuple[int, ...]
"""Tokens of each document of a row."""


@dataclass(frozen=True, kw_only=True)
class MeasuredRows:
    """Rows by their number.

    Args:
        tokens_V: the ids that are drawn from; V of them.
        documents: tokens of each document of a row.
        seed: seed of the draw.
    """

    tokens_V: np.ndarray
    documents: Documents
    seed: int = SEED

    @classmethod
    def of(cls, config: PretrainedConfig, documents: Documents) -> MeasuredRows:
        """Return the rows of a model, of tokens that its config, as it is now, names for no purpose."""
        return cls(tokens_V=ordinary_tokens(config), documents=documents)

    def row(self, number: int) -> Row:
        """Return a row; no token occurs twice in it unless it has more tokens than the vocabulary."""
        length = sum(self.documents)
        draw = np.random.default_rng((self.seed, number))
        ids_T = draw.choice(self.tokens_V, length, replace=length > len(self.tokens_V))
        return [_example(number, part) for part in np.split(ids_T, np.cumsum(self.documents)[:-1])]

    def rows(self, first: int, count: int) -> list[Row]:
        """Return rows one after the other."""
        return [self.row(number) for number in range(first, first + count)]

    def columns(self, number: int) -> dict[str, list[int]]:
        """Return a row as other tools' datasets have it; positions tell them where documents begin, if there are some.

        Returns:
            ``input_ids``, ``labels`` and, for several documents, ``position_ids``.
        """
        row = self.row(number)
        found = {
            "input_ids": np.concatenate([example.input_ids_T for example in row]).tolist(),
            "labels": np.concatenate([example.labels_T for example in row]).tolist(),
        }
        if len(row) > 1:
            found["position_ids"] = [place for example in row for place in range(len(example.input_ids_T))]
        return found

    def described(self) -> dict[str, Any]:
        """See :func:`described`."""
        return described(self.documents, self.seed)


def described(documents: Documents, seed: int = SEED) -> dict[str, Any]:
    """Return what is stored with a measurement on these rows; see ``constant_rows.py``."""
    return {"rows": {"tokens": "random", "seed": seed, "documents": name_of(documents)}}


def write_completions(file: Path, folder: Path, tokenizer: Any, *, count: int, length: int) -> None:
    """Write rows as text, for programs that read files: completions of at least so many tokens, to be cut there.

    Args:
        file: a JSON Lines file, which is replaced.
        folder: the model's.
        tokenizer: the model's.
        count: number of rows.
        length: tokens of a row.
    """
    rows = MeasuredRows.of(
        AutoConfig.from_pretrained(folder), (2 * length,)
    )  # spelled again, they may be fewer
    texts = (tokenizer.decode(rows.columns(number)["input_ids"]) for number in range(count))
    file.write_text(
        "".join(json.dumps({"prompt": "a", "completion": text}) + "\n" for text in texts), "utf-8"
    )


def ordinary_tokens(config: PretrainedConfig) -> np.ndarray:
    """Return the ids of a model's vocabulary that its config does not name for a purpose, such as padding or images."""
    vocabulary = np.arange(config.get_text_config().vocab_size, dtype=np.int64)
    return np.setdiff1d(vocabulary, list(_special_tokens(config.to_dict())))


def documents_of(name: str) -> Documents:
    """Read the documents of a row, such as ``4x512``; for command lines.

    Raises:
        argparse.ArgumentTypeError: if it is anything else.
    """
    match = _NAMED_DOCUMENTS.fullmatch(name)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"expected documents of a row, then tokens of each, such as 4x512, got {name!r}"
        )
    return (int(match[2]),) * int(match[1])


def name_of(documents: Documents) -> str:
    """Write what :func:`documents_of` reads; for documents of several lengths, the lengths."""
    if len(set(documents)) == 1:
        return f"{len(documents)}x{documents[0]}"
    return "+".join(map(str, documents))


def _example(number: int, ids_T: np.ndarray) -> TokenizedExample:
    labels_T = ids_T.copy()
    labels_T[0] = IGNORED_LABEL
    return TokenizedExample(sample_id=number, input_ids_T=ids_T, labels_T=labels_T)


def _special_tokens(fields: Mapping[Any, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _special_tokens(value)
        elif isinstance(name, str) and _SPECIAL.search(name):  # labels of classes have integers
            ids = value if isinstance(value, list | tuple) else [value]
            yield from (one for one in ids if isinstance(one, int))
