"""Loading of the examples that a run can train on, from its ``DataConfig``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import datasets
import numpy as np
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.batches.packing import pack_best_fit
from lowmem_ft.data.batches.row import TokenizedExample
from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.epoch_rows import Examples, MappedExamples, StreamedExamples, column
from lowmem_ft.data.sources.reading import READING_ERRORS, Source, no_example, reading_error
from lowmem_ft.data.sources.splits import num_held_out, open_split, sources_of
from lowmem_ft.data.summary import (
    SUMMARISED,
    DataSummary,
    LengthLimits,
    Outcome,
    check_known_tokens,
    marked_text,
    summarise,
)
from lowmem_ft.data.text.chat_templates import prepare_tokenizer, require_chat_template
from lowmem_ft.data.text.formats import ExampleFormat, choose_loss_on, recognise_format
from lowmem_ft.data.text.template_checks import NUM_CHECKED_EXAMPLES, log_template_problems
from lowmem_ft.data.text.tokenizing import TOKENIZED, Tokenization
from lowmem_ft.data.text.unused_fields import columns_left, columns_to_read, keys_left
from lowmem_ft.foundation.errors import DataError, raise_problems

logger = logging.getLogger(__name__)

TOKENIZING_BATCH_ROWS = 1000
STREAMING_BATCH_ROWS = 64
NUM_EXAMPLES_TO_LOOK_AT = 32
"""Training examples checked before the first step: fewer than a streamed batch, which is tokenized anyway."""

SHOWS_ROW = "shows_row"
"""Attribute of the log record that shows an example; a report that shows examples itself leaves it out."""


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The data that a run trains and evaluates on.

    Args:
        train: training examples.
        evaluation: held-out examples in their own order, or None.
        summary: counts of the training data, or None when streaming (they are logged after each epoch).
        evaluation_summary: counts of the held-out data, or None.
        collate: collates batches of either.
        formats: names of the formats of the examples.
    """

    train: Examples
    evaluation: Examples | None
    summary: DataSummary | None
    evaluation_summary: DataSummary | None
    collate: Collator
    formats: frozenset[str]


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
        tokenizer: changed in place if it lacks a pad token or a chat template, so that these are saved with it.
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
    if config.path is None:
        raise DataError("data.path names the training data, got null. Set data=FILE or data=HUB_NAME.")
    raise_problems(config.problems(), DataError)
    config = replace(config, max_length=_max_length(config, max_positions))
    limits = LengthLimits(max_length=config.max_length, of_model=max_positions)
    if int(os.environ.get("RANK", "0")) > 0:
        datasets.disable_progress_bars()
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
    loader = _Loader(config, tokenizer, vocab_size, limits, end_token_ids)
    return loader.streamed(collate) if config.streaming else loader.mapped(collate, seed)


@dataclass(frozen=True)
class _Loader:
    """Loads the splits of a run's data, all of them in the same way."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    limits: LengthLimits
    end_token_ids: Collection[int] | None
    formats: set[str] = field(default_factory=set)

    def mapped(self, collate: Collator, seed: int) -> PreparedData:
        """Return tokenized tables, the training examples among which ``seed`` may hold some out."""
        train_source, eval_source = sources_of(self.config)
        train_table, eval_table = self._table(train_source, is_train=True), None
        if eval_source is not None:
            eval_table = self._table(eval_source, is_train=False)
        elif self.config.eval_size is not None:
            train_table, eval_table = _hold_out(train_table, self.config.eval_size, seed)
        train, summary = self._examples(train_table, train_source, is_train=True)
        self._look_at(train.head(NUM_EXAMPLES_TO_LOOK_AT))
        evaluation, evaluation_summary = None, None
        if eval_table is not None:
            source = eval_source or train_source
            evaluation, evaluation_summary = self._examples(eval_table, source, is_train=False)
        return PreparedData(
            train=train,
            evaluation=evaluation,
            summary=summary,
            evaluation_summary=evaluation_summary,
            collate=collate,
            formats=frozenset(self.formats),
        )

    def streamed(self, collate: Collator) -> PreparedData:
        """Return examples that are tokenized while they are read."""
        train_source, eval_source = sources_of(self.config)
        train = self._stream(train_source, is_train=True)
        self._look_at(train.head(NUM_EXAMPLES_TO_LOOK_AT))
        evaluation = None if eval_source is None else self._stream(eval_source, is_train=False)
        return PreparedData(
            train=train,
            evaluation=evaluation,
            summary=None,
            evaluation_summary=None,
            collate=collate,
            formats=frozenset(self.formats),
        )

    def _tokenization(self, source: Source, first_row: dict[str, Any]) -> Tokenization:
        has_chat_template = self.tokenizer.chat_template is not None
        example_format = recognise_format(
            self.config, list(first_row), has_chat_template=has_chat_template, source=str(source)
        )
        if example_format.is_chat(first_row):
            require_chat_template(self.tokenizer)
        elif example_format.name == "text" and source.is_split_into_lines():
            logger.info(
                "Each line of %s is an example. For prose, set data.sample_by=paragraph or document.", source
            )
        elif has_chat_template and example_format.name == "prompt_completion":
            logger.info(
                "Prompts and completions are strings, so they are joined unchanged. To wrap them in the chat template, "
                "add data.format=alpaca."
            )
        _tell_of_unused(example_format, first_row, self.tokenizer, source)
        self.formats.add(example_format.name)
        return Tokenization(
            tokenizer=self.tokenizer,
            example_format=example_format,
            loss_on=choose_loss_on(self.config, example_format),
            max_length=self.config.max_length,
            source=str(source),
            vocab_size=self.vocab_size,
        )

    def _table(self, source: Source, *, is_train: bool) -> datasets.Dataset:
        """Return the tokenized table of a split, including dropped examples, from the cache if it was made before."""
        rows = open_split(self.config, source, is_train=is_train)
        try:
            tokenization = self._tokenization(source, rows[0])
            rows = rows.select_columns(columns_to_read(tokenization.example_format, rows.column_names))
            tokenized = rows.map(
                tokenization,
                with_indices=True,
                batched=True,
                batch_size=TOKENIZING_BATCH_ROWS,
                writer_batch_size=TOKENIZING_BATCH_ROWS,
                remove_columns=rows.column_names,
                features=TOKENIZED,
                num_proc=self.config.num_proc,
                # Hashing the function itself would hash the tokenizer's inner state, which changes as it is used.
                new_fingerprint=Hasher.hash([rows._fingerprint, tokenization.key()]),
                desc=f"Tokenizing {source}",
            )
            if is_train:
                first = rows.select(range(min(len(rows), NUM_CHECKED_EXAMPLES)))
                log_template_problems(tokenization, first, self.end_token_ids)
            return tokenized
        except UnicodeDecodeError as error:
            # Arrow accepts any bytes as text; only reading a row decodes them.
            raise reading_error(error, source) from error

    def _examples(
        self, table: datasets.Dataset, source: Source, *, is_train: bool
    ) -> tuple[MappedExamples, DataSummary]:
        columns = {name: column(table, name) for name in SUMMARISED}
        outcomes, lengths = columns["outcome"], columns["num_tokens"]
        summary = summarise(columns)
        summary.require_examples(str(source))
        is_kept = outcomes == Outcome.KEPT
        if not is_kept.all():
            table = table.select(np.flatnonzero(is_kept))
        packed = None
        if self.config.packing:
            assert self.config.max_length is not None
            packed = pack_best_fit(lengths[is_kept].astype(np.int64), self.config.max_length)
            summary = replace(summary, num_rows=len(packed), row_capacity=self.config.max_length)
        summary.log(f"{'Training' if is_train else 'Held-out'} data {source}", self.limits)
        examples = MappedExamples(
            table,
            shuffle=self.config.shuffle and is_train,
            group_by_length=self.config.group_by_length and is_train,
            packed=packed,
        )
        return examples, summary

    def _stream(self, source: Source, *, is_train: bool) -> StreamedExamples:
        rows = open_split(self.config, source, is_train=is_train)
        first_row = next(_batches(rows, source, batch_rows=1), None)
        if first_row is None:
            raise no_example(source)
        first_row = {name: values[0] for name, values in first_row.items()}
        tokenization = self._tokenization(source, first_row)
        if is_train:
            log_template_problems(tokenization, [first_row], self.end_token_ids)
        rows = rows.select_columns(columns_to_read(tokenization.example_format, list(first_row)))
        return StreamedExamples(
            _tokenized_batches(rows, source, tokenization),
            source=str(source),
            shuffle_buffer_size=self.config.shuffle_buffer_size if self.config.shuffle and is_train else 1,
            pack_to=self.config.max_length if self.config.packing else None,
            limits=self.limits,
        )

    def _look_at(self, examples: Sequence[TokenizedExample]) -> None:
        check_known_tokens(examples, self.tokenizer)
        example = examples[0]
        text = marked_text(example.input_ids_T, example.labels_T, self.tokenizer)
        logger.info(
            "Example %d as the model reads it, learnt text between ⟦ and ⟧:\n%s",
            example.sample_id,
            text,
            extra={SHOWS_ROW: True},
        )


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


def _tell_of_unused(
    example_format: ExampleFormat, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, source: Source
) -> None:
    """Log all unused fields, once; the loss from those that other tools read is counted and warned about later."""
    template = tokenizer.get_chat_template() if example_format.is_chat(row) else None
    left = columns_left(example_format, list(row))
    keys = keys_left(example_format, row, template)
    said = [", ".join(left)] if left else []
    said += [f"in messages {', '.join(keys)}"] if keys else []
    if said:
        logger.info("Not used from %s: %s.", source, "; ".join(said))


def _hold_out(table: datasets.Dataset, size: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split the table in two; the pieces of one document stay together."""
    sample_ids = column(table, "sample_id")
    candidates = np.unique(sample_ids)
    count = num_held_out(size, len(candidates))
    chosen = np.random.default_rng([seed, len(candidates)]).choice(candidates, count, replace=False)
    is_held_out = np.isin(sample_ids, chosen)
    return table.select(np.flatnonzero(~is_held_out)), table.select(np.flatnonzero(is_held_out))


def _tokenized_batches(
    rows: Any, source: Source, tokenization: Tokenization
) -> Callable[[], Iterator[dict[str, list[Any]]]]:
    def from_the_start() -> Iterator[dict[str, list[Any]]]:
        num_read = 0
        for columns in _batches(rows, source, batch_rows=STREAMING_BATCH_ROWS):
            num_rows = len(next(iter(columns.values())))
            yield tokenization(columns, list(range(num_read, num_read + num_rows)))
            num_read += num_rows

    return from_the_start


def _batches(rows: Any, source: Source, *, batch_rows: int) -> Iterator[dict[str, list[Any]]]:
    """Yield batches of raw columns; a stream meets a malformed file only here."""
    try:
        yield from rows.iter(batch_size=batch_rows)
    except READING_ERRORS as error:
        raise reading_error(error, source) from error
