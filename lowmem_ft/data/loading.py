"""Loading of the examples that a run can train on, from its ``DataConfig``."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from typing import Any

import datasets
import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.batches.packing import pack_best_fit
from lowmem_ft.data.batches.row import TokenizedExample
from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.epoch_rows import (
    OF_UNUSED,
    Examples,
    MappedExamples,
    StreamedExamples,
    TokenizedStream,
    column,
)
from lowmem_ft.data.mixing import JoinedExamples, drawn, mixed, probabilities_of
from lowmem_ft.data.source_keys import without_weights
from lowmem_ft.data.sources.full_cache import full_cache
from lowmem_ft.data.sources.reading import READING_ERRORS, Source, no_example, reading_error
from lowmem_ft.data.sources.splits import Part, held_out_parts, num_held_out, training_parts
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
from lowmem_ft.data.text.tokenized_rows import tokenized_rows
from lowmem_ft.data.text.tokenizing import Tokenization
from lowmem_ft.data.text.unused_fields import columns_left, columns_to_read, keys_left
from lowmem_ft.foundation.errors import DataError, raise_problems
from lowmem_ft.foundation.units import counted

logger = logging.getLogger(__name__)

STREAMING_BATCH_ROWS = 64
NUM_EXAMPLES_TO_LOOK_AT = 32
"""Training examples checked before the first step: fewer than a streamed batch, which is tokenized anyway."""

SHOWS_ROW = "shows_row"
"""Attribute of the log record that shows an example; a report that shows examples itself leaves it out."""


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """One of several sources in an epoch.

    Args:
        name: names its metrics.
        source: its path and split.
        examples: examples that an epoch takes from it, repeated ones counted each time.
        tokens: tokens of these.
        share: share of the epoch's tokens.
    """

    name: str
    source: str
    examples: int
    tokens: int
    share: float


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """The data that a run trains and evaluates on.

    Args:
        train: training examples of all sources.
        evaluation: held-out examples in their own order, source after source, or None.
        summary: counts of the training data in an epoch, or None when streaming (they are logged after each epoch).
        evaluation_summary: counts of the held-out data, or None.
        collate: collates batches of either.
        evaluation_by_source: the same held-out examples by the name of their source; empty if all have one source.
        sources: what an epoch takes from each of several sources; empty for one source, and when streaming.
        fingerprint: digest of the tokens of all training rows and of what is learnt of them; when streaming, of the
            first ones.
        formats: names of the formats of the examples.
    """

    train: Examples
    evaluation: Examples | None
    summary: DataSummary | None
    evaluation_summary: DataSummary | None
    collate: Collator
    evaluation_by_source: Mapping[str, Examples] = field(default_factory=dict)
    sources: tuple[SourceCounts, ...] = ()
    fingerprint: str = ""
    formats: frozenset[str] = frozenset()


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
    if not config.is_named:
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
        training, held_out = training_parts(self.config), held_out_parts(self.config)
        tables = [self._table(part) for part in training]
        num_read = [int(column(table, "sample_id").max(initial=-1)) + 1 for table in tables]
        fingerprint = _digest(column(table, "digest") for table in tables)
        eval_tables = [self._table(part) for part in held_out]
        if self.config.eval_size is not None:
            held_out = [replace(part, is_train=False) for part in training]
            halves = [_hold_out(table, self.config.eval_size, seed) for table in tables]
            tables, eval_tables = [train for train, _ in halves], [rest for _, rest in halves]
        kept = [self._kept(table, part) for table, part in zip(tables, training, strict=True)]
        train, summary, sources = self._mixed(kept, training, num_read, seed)
        evaluation, summaries = {}, []
        for table, part in zip(eval_tables, held_out, strict=True):
            eval_table, eval_summary = self._kept(table, part)
            evaluation[part.listed.name], packed_summary = self._examples(eval_table, eval_summary)
            summaries.append(packed_summary)
        return PreparedData(
            train=train,
            summary=summary,
            evaluation_summary=reduce(DataSummary.__add__, summaries) if summaries else None,
            collate=collate,
            sources=sources,
            fingerprint=fingerprint,
            formats=frozenset(self.formats),
            **_evaluation(evaluation),
        )

    def streamed(self, collate: Collator) -> PreparedData:
        """Return examples that are tokenized while they are read."""
        parts = training_parts(self.config)
        streams = [self._stream(part) for part in parts]
        heads = [list(islice(stream.examples(), NUM_EXAMPLES_TO_LOOK_AT)) for stream in streams]
        for head in heads:
            self._look_at(head)
        probabilities = probabilities_of([part.listed for part in parts])
        if len(parts) > 1 and probabilities is None:
            raise DataError(without_weights(len(parts)))

        def examples(generator: np.random.Generator) -> Iterator[TokenizedExample]:
            if probabilities is None:
                return streams[0].examples()
            starts = [stream.examples for stream in streams]
            return drawn(starts, probabilities, generator, stopping_strategy=self.config.stopping_strategy)

        train = StreamedExamples(
            examples,
            source=", ".join(str(part.source) for part in parts),
            shuffle_buffer_size=self.config.shuffle_buffer_size if self.config.shuffle else 1,
            pack_to=self.config.max_length if self.config.packing else None,
        )
        for part, probability in zip(parts, probabilities or (), strict=bool(probabilities)):
            logger.info("Of the examples of an epoch, %.1f %% come from %s.", 100 * probability, part.source)
        evaluation = {part.listed.name: self._held_out_stream(part) for part in held_out_parts(self.config)}
        return PreparedData(
            train=train,
            summary=None,
            evaluation_summary=None,
            collate=collate,
            fingerprint=_digest(
                array for head in heads for one in head for array in (one.input_ids_T, one.labels_T)
            ),
            formats=frozenset(self.formats),
            **_evaluation(evaluation),
        )

    def _tokenization(self, part: Part, first_row: dict[str, Any]) -> Tokenization:
        source, config = part.source, part.listed.config
        has_chat_template = self.tokenizer.chat_template is not None
        example_format = recognise_format(
            config, list(first_row), has_chat_template=has_chat_template, source=str(source)
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
            loss_on=choose_loss_on(config, example_format),
            max_length=self.config.max_length,
            source=str(source),
            vocab_size=self.vocab_size,
            blank_is_row=not source.is_text(),
        )

    def _table(self, part: Part) -> datasets.Dataset:
        """Return the tokenized table of a split, including dropped examples, from the cache if it was made before."""
        with part.listed.named_in_errors():
            rows = part.open()
            try:
                tokenization = self._tokenization(part, rows[0])
                rows = rows.select_columns(columns_to_read(tokenization.example_format, rows.column_names))
                tokenized = tokenized_rows(rows, tokenization, num_proc=self.config.num_proc)
                if part.is_train:
                    first = rows.select(range(min(len(rows), NUM_CHECKED_EXAMPLES)))
                    log_template_problems(tokenization, first, self.end_token_ids)
                return tokenized
            except UnicodeDecodeError as error:
                # Arrow accepts any bytes as text; only reading a row decodes them.
                raise reading_error(error, part.source) from error
            except OSError as error:
                if (problem := full_cache(error)) is None:
                    raise
                raise problem from error

    def _kept(self, table: datasets.Dataset, part: Part) -> tuple[datasets.Dataset, DataSummary]:
        """Return the examples to use, and the counts of all, which are logged."""
        columns = {name: column(table, name) for name in SUMMARISED}
        summary = summarise(columns)
        with part.listed.named_in_errors():
            summary.require_examples(str(part.source))
        is_kept = columns["outcome"] == Outcome.KEPT
        if not is_kept.all():
            table = table.select(np.flatnonzero(is_kept))
        summary.log(f"{'Training' if part.is_train else 'Held-out'} data {part.source}", self.limits)
        examples = MappedExamples(table, shuffle=False)
        if part.is_train:
            self._look_at(examples.head(NUM_EXAMPLES_TO_LOOK_AT))
        has_unused = columns["unused_fields"][is_kept] > 0
        if has_unused.any():
            self._show(examples.example(int(np.argmax(has_unused))), OF_UNUSED)
        return table, summary

    def _mixed(
        self,
        kept: Sequence[tuple[datasets.Dataset, DataSummary]],
        parts: Sequence[Part],
        num_read: Sequence[int],
        seed: int,
    ) -> tuple[MappedExamples, DataSummary, tuple[SourceCounts, ...]]:
        """Return the training examples of all sources, their counts, and those of each source if there are several."""
        listed = [part.listed for part in parts]
        if len(parts) == 1 and listed[0].repeats == 1:
            return *self._examples(*kept[0], is_train=True), ()
        table, sources = mixed(
            [table for table, _ in kept], listed, seed=seed, stopping_strategy=self.config.stopping_strategy
        )
        first_ids = np.concatenate([[0], np.cumsum(num_read)[:-1]]).astype(np.int64)
        in_all = reduce(DataSummary.__add__, [summary for _, summary in kept])
        counts = summarise({name: column(table, name) for name in SUMMARISED})
        summary = replace(counts, outcomes=Counter({**in_all.outcomes, **counts.outcomes}))
        lengths = np.bincount(sources, weights=column(table, "num_tokens"), minlength=len(parts))
        rows = np.bincount(sources, minlength=len(parts))
        of_each = tuple(
            SourceCounts(
                name=part.listed.name,
                source=str(part.source),
                examples=int(num_rows),
                tokens=int(num_tokens),
                share=round(float(num_tokens / lengths.sum()), 6),
            )
            for part, num_rows, num_tokens in zip(parts, rows, lengths, strict=True)
        )
        for one, first_id, read in zip(of_each, first_ids, num_read, strict=True):
            logger.log(
                logging.INFO if one.examples else logging.WARNING,  # a source that is never drawn
                "An epoch takes %s of %s, %s tokens, %.1f %% of all (%s); examples %d to %d are its rows.",
                *(counted(one.examples, "example"), one.source, f"{one.tokens:,}", 100 * one.share, one.name),
                *(first_id, first_id + read - 1),
            )
        return *self._examples(table, summary, is_train=True, first_ids=first_ids[sources]), of_each

    def _examples(
        self,
        table: datasets.Dataset,
        summary: DataSummary,
        *,
        is_train: bool = False,
        first_ids: np.ndarray | None = None,
    ) -> tuple[MappedExamples, DataSummary]:
        """Return examples in the rows of an epoch, packed if the recipe says so, and their counts."""
        packed = None
        if self.config.packing:
            assert self.config.max_length is not None
            packed = pack_best_fit(column(table, "num_tokens").astype(np.int64), self.config.max_length)
            summary = replace(summary, num_rows=len(packed), row_capacity=self.config.max_length)
            logger.info("%s data: %s", "Training" if is_train else "Held-out", summary.packed_words)
        examples = MappedExamples(
            table,
            shuffle=self.config.shuffle and is_train,
            group_by_length=self.config.group_by_length and is_train,
            packed=packed,
            first_ids=first_ids,
        )
        return examples, summary

    def _stream(self, part: Part) -> TokenizedStream:
        source = part.source
        with part.listed.named_in_errors():
            rows = part.open()
            first_batch = next(_batches(rows, source, batch_rows=1), None)
            if first_batch is None:
                raise no_example(source)
            first_row = {name: values[0] for name, values in first_batch.items()}
            tokenization = self._tokenization(part, first_row)
            if part.is_train:
                log_template_problems(tokenization, [first_row], self.end_token_ids)
        rows = rows.select_columns(columns_to_read(tokenization.example_format, list(first_row)))
        return TokenizedStream(
            _tokenized_batches(rows, source, tokenization),
            source=str(source),
            limits=self.limits,
            show=self._show,
        )

    def _held_out_stream(self, part: Part) -> StreamedExamples:
        stream = self._stream(part)
        return StreamedExamples(
            lambda _: stream.examples(),
            source=str(part.source),
            shuffle_buffer_size=1,
            pack_to=self.config.max_length if self.config.packing else None,
        )

    def _look_at(self, examples: Sequence[TokenizedExample]) -> None:
        check_known_tokens(examples, self.tokenizer)
        self._show(examples[0])

    def _show(self, example: TokenizedExample, why: str = "") -> None:
        text = marked_text(example.input_ids_T, example.labels_T, self.tokenizer)
        logger.info(
            "Example %d%s as the model reads it, learnt text between ⟦ and ⟧:\n%s",
            example.sample_id,
            why,
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
    left = columns_left(example_format, row)
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


def _evaluation(by_source: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of held-out examples."""
    if len(by_source) < 2:
        return {"evaluation": next(iter(by_source.values()), None)}
    return {"evaluation": JoinedExamples(list(by_source.values())), "evaluation_by_source": by_source}


def _digest(arrays: Iterable[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]


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
