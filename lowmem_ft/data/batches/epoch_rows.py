"""Rows to train on, in the order of an epoch: read from a memory-mapped table, or created while the data streams in.

A row is one example, or with packing several that share a row of the batch. Axes: T tokens of one example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Protocol

import datasets
import numpy as np
import pyarrow
from datasets.utils import tqdm

from lowmem_ft.data.batches.order import epoch_order
from lowmem_ft.data.batches.packing import PackedRows, pack_best_fit
from lowmem_ft.data.row import IGNORED_LABEL, Row, TokenizedExample
from lowmem_ft.data.text.summary import DataSummary, LengthLimits, Outcome, summarise

logger = logging.getLogger(__name__)

JUDGED_EXAMPLES = 256
"""Examples of a stream that are judged: enough to say what share of it is lost, few enough to say so early."""

MASKS_READ = 10_000
"""Examples whose masks are read at a time."""

PACKING_BUFFER_EXAMPLES = 1000
"""Streamed examples that are packed together: enough for rows about 99% full, few enough to hold in memory."""


OF_UNUSED = ", the first with a field that the model does not see,"
"""Words for an example that is shown in addition to the first one."""


class Examples(Protocol):
    """Examples in the form that a data stream needs.

    ``order`` yields references to the rows of an epoch, so that a process reads only the rows of its own micro-batches.
    """

    @property
    def num_rows(self) -> int | None:
        """Rows of an epoch, or None when streaming."""
        ...

    def order(self, seed: int, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield references to the rows of an epoch from the row at ``start`` on; the same in every process."""
        ...

    def read(self, reference: Any) -> Row:
        """Return the row of a reference."""
        ...

    def head(self, count: int) -> list[TokenizedExample]:
        """Return the first examples in the order of the source."""
        ...


class MappedExamples:
    """Examples in a memory-mapped table: random access, and resuming costs nothing.

    Args:
        table: tokenized examples with the columns ``tokenizing.TOKENIZED``, all of them kept ones.
        shuffle: whether each epoch has a new order.
        group_by_length: whether neighbours have similar lengths.
        packed: assignment of examples to rows; None: each has its own.
        first_ids: int64, for each example the number of rows in the sources before its own; None: there is one source.
    """

    def __init__(
        self,
        table: datasets.Dataset,
        *,
        shuffle: bool,
        group_by_length: bool = False,
        packed: PackedRows | None = None,
        first_ids: np.ndarray | None = None,
    ) -> None:
        self._table = table.select_columns(["sample_id", "input_ids", "is_learnt"]).with_format("numpy")
        self._shuffle, self._group_by_length, self._packed = shuffle, group_by_length, packed
        self._first_ids = first_ids
        lengths = column(table, "num_tokens").astype(np.int64)
        self.row_lengths = (
            lengths if packed is None else np.add.reduceat(lengths[packed.members], packed.offsets[:-1])
        )

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return len(self.row_lengths)

    def order(self, seed: int, epoch: int, start: int = 0) -> Iterator[int]:
        """Yield the row indices of an epoch from ``start`` on."""
        order = epoch_order(
            self.row_lengths,
            seed=seed,
            epoch=epoch,
            shuffle=self._shuffle,
            group_by_length=self._group_by_length,
        )
        return iter(order[start:].tolist())

    def read(self, reference: int) -> Row:
        """Return the row at an index."""
        members = [reference] if self._packed is None else self._packed.row(reference).tolist()
        return [self.example(index) for index in members]

    def masks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the lengths of some examples and their learnt masks end to end, for all examples in turn."""
        parts: Any = self._table.select_columns("is_learnt").with_format("arrow").iter(MASKS_READ)
        for part in parts:
            mask = pyarrow.concat_arrays(part["is_learnt"].chunks)
            lengths_R = mask.value_lengths().to_numpy(zero_copy_only=False)
            yield lengths_R.astype(np.int64), mask.flatten().to_numpy(zero_copy_only=False)

    def head(self, count: int) -> list[TokenizedExample]:
        """Return the first examples in the order of the source."""
        return [self.example(index) for index in range(min(count, len(self._table)))]

    def example(self, index: int) -> TokenizedExample:
        """Return one example in the order of the source."""
        return _example(self._table[index], 0 if self._first_ids is None else int(self._first_ids[index]))


class TokenizedStream:
    """The examples of one source, read and tokenized while they are iterated over.

    Args:
        tokenized: starts the source again and yields tokenized batches of columns ``tokenizing.TOKENIZED``.
        source: the origin of the data, for messages.
        limits: limits that cut examples, for messages.
        show: logs the first example with an unused field, and why it is shown.
    """

    def __init__(
        self,
        tokenized: Callable[[], Iterable[dict[str, list[Any]]]],
        *,
        source: str,
        limits: LengthLimits,
        show: Callable[[TokenizedExample, str], None],
    ) -> None:
        self._tokenized, self._source, self._limits, self._show = tokenized, source, limits, show
        self._has_warned = self._has_shown = False

    def examples(self) -> Iterator[TokenizedExample]:
        """Yield the examples of one epoch that are kept, in the order of the source, and log their counts."""
        summary = DataSummary()
        for columns in self._tokenized():
            summary = summary + summarise(columns)
            if not self._has_warned and summary.num_read >= JUDGED_EXAMPLES:
                source = f"{self._source}, the first {summary.num_read:,}"
                self._has_warned = summary.warn(source, self._limits)
            for values in zip(*columns.values(), strict=True):
                tokenized = dict(zip(columns, values, strict=True))
                if tokenized["outcome"] == Outcome.KEPT:
                    example = _example(tokenized)
                    if tokenized["unused_fields"] and not self._has_shown:
                        self._has_shown = True
                        self._show(example, OF_UNUSED)
                    yield example
        summary.require_examples(self._source)
        summary.log(f"{self._source}, one epoch", self._limits, warn=not self._has_warned)
        self._has_warned = True


class StreamedExamples:
    """Examples that are read and tokenized while the epoch runs; only the buffers are kept.

    A process reads the whole stream and uses its own share. Resuming replays the epoch up to the position.

    Args:
        examples: starts an epoch and yields its examples; the generator draws from which source the next one comes.
        source: the origin of the data, for messages.
        shuffle_buffer_size: examples from which the next one is drawn; 1 keeps the order of the source.
        pack_to: tokens of a packed row, or None.
    """

    num_rows = None

    def __init__(
        self,
        examples: Callable[[np.random.Generator], Iterator[TokenizedExample]],
        *,
        source: str,
        shuffle_buffer_size: int,
        pack_to: int | None,
    ) -> None:
        self._examples, self._source = examples, source
        self._shuffle_buffer_size, self._pack_to = shuffle_buffer_size, pack_to

    def order(self, seed: int, epoch: int, start: int = 0) -> Iterator[Row]:
        """Yield the rows of an epoch themselves; those before ``start`` are read again and skipped."""
        examples = self._examples(np.random.default_rng([seed, epoch, _DRAWS]))
        if self._shuffle_buffer_size > 1:
            examples = _shuffled(examples, self._shuffle_buffer_size, np.random.default_rng([seed, epoch]))
        rows = (
            ([example] for example in examples) if self._pack_to is None else _packed(examples, self._pack_to)
        )
        if start:
            logger.info("Reading %d rows of %s again, up to where the run stopped.", start, self._source)
            for _ in tqdm(islice(rows, start), total=start, desc="Replaying", unit=" rows"):
                pass
        return rows

    def read(self, reference: Row) -> Row:
        """Return the row itself."""
        return reference

    def head(self, count: int) -> list[TokenizedExample]:
        """Return the first examples, in the order of the source, or as they are drawn among several."""
        return list(islice(self._examples(np.random.default_rng([0, 0, _DRAWS])), count))


_DRAWS = 1
"""Keeps the draws among sources apart from those of the shuffle buffer, which have the same seed and epoch."""


def column(table: datasets.Dataset, name: str) -> np.ndarray:
    """Return one numeric column of a table, without reading the others."""
    values: Any = table.select_columns([name]).with_format("numpy")[:]
    return np.asarray(values[name])


def _example(tokenized: dict[str, Any], first_id: int = 0) -> TokenizedExample:
    input_ids_T = np.asarray(tokenized["input_ids"], dtype=np.int64)
    labels_T = np.where(np.asarray(tokenized["is_learnt"], dtype=bool), input_ids_T, IGNORED_LABEL)
    return TokenizedExample(first_id + int(tokenized["sample_id"]), input_ids_T, labels_T)


def _shuffled(
    examples: Iterator[TokenizedExample], buffer_size: int, generator: np.random.Generator
) -> Iterator[TokenizedExample]:
    """Yield the examples, each drawn at random from a buffer that the next one then refills."""
    buffer = list(islice(examples, buffer_size))
    for example in examples:
        drawn = int(generator.integers(len(buffer)))
        yield buffer[drawn]
        buffer[drawn] = example
    for index in generator.permutation(len(buffer)).tolist():
        yield buffer[index]


def _packed(examples: Iterator[TokenizedExample], capacity: int) -> Iterator[Row]:
    while buffer := list(islice(examples, PACKING_BUFFER_EXAMPLES)):
        packed = pack_best_fit(np.array([len(example.input_ids_T) for example in buffer]), capacity)
        for index in range(len(packed)):
            yield [buffer[member] for member in packed.row(index)]
