"""Several sources as one: mixed once where all examples are known, drawn from while they stream in.

``datasets`` mixes tables, by their indices and without a copy. Streams are drawn from here: its iterable mixtures would
read the first examples of each source to guess their types, in every epoch, and convert each through Arrow.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import datasets
import numpy as np

from lowmem_ft.data.batches.epoch_rows import Examples
from lowmem_ft.data.row import Row, TokenizedExample
from lowmem_ft.data.sources.listed import ListedSource
from lowmem_ft.foundation.errors import DataError


def mixed(
    tables: Sequence[datasets.Dataset], listed: Sequence[ListedSource], *, seed: int, stopping_strategy: str
) -> tuple[datasets.Dataset, np.ndarray]:
    """Return the examples of an epoch, of all sources, and the source of each.

    Args:
        tables: one table for each source, all with the same columns.
        listed: the sources, whose weights or repeats count.
        seed: decides, with weights, which source is next.
        stopping_strategy: with weights, what ends an epoch.

    Returns:
        The table, and int64 indices of sources.

    Raises:
        DataError: if the columns differ.
    """
    marks = [
        datasets.Dataset.from_dict({"source": np.full(len(table), index)})
        for index, table in enumerate(tables)
    ]
    table, sources = (
        _mixed(parts, listed, seed=seed, stopping_strategy=stopping_strategy) for parts in (tables, marks)
    )
    return table, np.asarray(sources.with_format("numpy")["source"][:], dtype=np.int64)


def _mixed(
    tables: Sequence[datasets.Dataset], listed: Sequence[ListedSource], **options: Any
) -> datasets.Dataset:
    probabilities = probabilities_of(listed)
    if probabilities is None:
        repeated = [table for table, one in zip(tables, listed, strict=True) for _ in range(one.repeats)]
        return concatenated(repeated, listed)
    _refuse_endless_epoch(tables, listed, probabilities, **options)
    with _explaining_columns(listed):
        return datasets.interleave_datasets(list(tables), probabilities=probabilities, **options)


LONGEST_EPOCH = 1000
"""Longest epoch, in multiples of the examples of all sources: a longer one is a mistake, and takes hours to draw."""


def _refuse_endless_epoch(
    tables: Sequence[datasets.Dataset],
    listed: Sequence[ListedSource],
    probabilities: Sequence[float],
    *,
    stopping_strategy: str,
    **_: Any,
) -> None:
    """Refuse weights with which the last source is exhausted only after a multiple of all examples.

    Raises:
        DataError: names the weight to raise.
    """
    draws = [len(table) / probability for table, probability in zip(tables, probabilities, strict=True)]
    num_examples = sum(map(len, tables))
    if stopping_strategy == "all_exhausted" and max(draws) > LONGEST_EPOCH * num_examples:
        one = listed[draws.index(max(draws))]
        raise DataError(
            f"data.stopping_strategy=all_exhausted ends an epoch once each source has been read: with {one.setting}="
            f"{one.path} and its weight of {one.weight:g} after about {max(draws):,.0f} examples, and there are "
            f"{num_examples:,}. Raise that weight, or set data.stopping_strategy=first_exhausted."
        )


def concatenated(tables: Sequence[datasets.Dataset], listed: Sequence[ListedSource]) -> datasets.Dataset:
    """Return tables of several sources one after the other.

    Raises:
        DataError: if their columns differ.
    """
    with _explaining_columns(listed):
        return datasets.concatenate_datasets(list(tables))


@contextlib.contextmanager
def _explaining_columns(listed: Sequence[ListedSource]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # of features that cannot be aligned
        raise DataError(
            f"The sources {', '.join(one.path for one in listed)} have different columns, and cannot be mixed as they "
            f"are: {error} Give them the same columns."
        ) from error


def probabilities_of(listed: Sequence[ListedSource]) -> list[float] | None:
    """Return the probability of each source, in proportion to the weights; None without weights."""
    weights = [one.weight for one in listed if one.weight is not None]
    return [weight / sum(weights) for weight in weights] if weights else None


def drawn(
    streams: Sequence[Callable[[], Iterator[TokenizedExample]]],
    probabilities: Sequence[float],
    generator: np.random.Generator,
    *,
    stopping_strategy: str,
) -> Iterator[TokenizedExample]:
    """Yield the examples of an epoch, each from a source drawn at random; the order within a source stays.

    Args:
        streams: each starts a source again.
        probabilities: one for each source; their sum is 1.
        generator: draws.
        stopping_strategy: ``first_exhausted`` ends with the first source, ``all_exhausted`` with the last one.
    """
    running = [stream() for stream in streams]
    left = set(range(len(streams)))
    while True:
        index = int(generator.choice(len(streams), p=probabilities))
        example = next(running[index], None)
        if example is None:
            left.discard(index)
            if not left or stopping_strategy == "first_exhausted":
                return
            running[index] = streams[index]()
            example = next(running[index])
        yield example


class JoinedExamples:
    """Held-out examples of several sources, one source after the other.

    Args:
        parts: the examples of each.
    """

    def __init__(self, parts: Sequence[Examples]) -> None:
        self._parts = parts

    @property
    def num_rows(self) -> int | None:
        """Rows of all sources, or None when streaming."""
        counts = [part.num_rows for part in self._parts]
        return None if None in counts else sum(count or 0 for count in counts)

    def order(self, seed: int, epoch: int, start: int = 0) -> Iterator[tuple[Examples, Any]]:
        """Yield references from the row at ``start`` on, source by source."""
        number = 0
        for part in self._parts:
            for reference in part.order(seed, epoch):
                if number >= start:
                    yield part, reference
                number += 1

    def read(self, reference: tuple[Examples, Any]) -> Row:
        """Return the row of a reference."""
        part, of_part = reference
        return part.read(of_part)

    def head(self, count: int) -> list[TokenizedExample]:
        """Return the first examples of each source, the sources in turn."""
        in_turn = itertools.zip_longest(*(part.head(count) for part in self._parts))
        return [example for one_each in in_turn for example in one_each if example is not None][:count]
