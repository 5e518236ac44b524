"""The data of a run in tables that are mapped into memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import datasets
import numpy as np

from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.batches.epoch_rows import OF_UNUSED, MappedExamples, column
from lowmem_ft.data.batches.packing import pack_best_fit
from lowmem_ft.data.mixing import mixed
from lowmem_ft.data.prepared_data import PreparedData, SourceCounts, digest_of, evaluation_fields
from lowmem_ft.data.repeated_rows import find_repeated_rows
from lowmem_ft.data.sources.splits import Part, held_out_parts, num_held_out, training_parts
from lowmem_ft.data.text.summary import SUMMARISED, DataSummary, Outcome, summarise
from lowmem_ft.data.tokenized_parts import NUM_EXAMPLES_TO_LOOK_AT, TokenizedParts
from lowmem_ft.foundation.units import counted

logger = logging.getLogger(__name__)


def mapped_data(tokenized: TokenizedParts, collate: Collator, seed: int) -> PreparedData:
    """Return tokenized tables, the training examples among which ``seed`` may hold some out."""
    config = tokenized.config
    training, held_out = training_parts(config), held_out_parts(config)
    tables = [tokenized.table(part) for part in training]
    num_read = [int(column(table, "sample_id").max(initial=-1)) + 1 for table in tables]
    fingerprint = digest_of(column(table, "digest") for table in tables)
    eval_tables = [tokenized.table(part) for part in held_out]
    if config.eval_size is not None:
        held_out = [replace(part, is_train=False) for part in training]
        halves = [_hold_out(table, config.eval_size, seed) for table in tables]
        tables, eval_tables = [train for train, _ in halves], [rest for _, rest in halves]
    kept = [_kept(tokenized, table, part) for table, part in zip(tables, training, strict=True)]
    train, summary, sources = _mixed(tokenized, kept, training, num_read, seed)
    eval_kept = [_kept(tokenized, table, part) for table, part in zip(eval_tables, held_out, strict=True)]
    evaluation, summaries = {}, []
    for (eval_table, eval_summary), part in zip(eval_kept, held_out, strict=True):
        evaluation[part.listed.name], packed_summary = _examples(tokenized, eval_table, eval_summary)
        summaries.append(packed_summary)
    repeated = find_repeated_rows(
        [table for table, _ in kept],
        training,
        [table for table, _ in eval_kept],
        held_out,
        is_split=config.eval_size is not None,
    )
    return PreparedData(
        train=train,
        summary=summary,
        evaluation_summary=reduce(DataSummary.__add__, summaries) if summaries else None,
        collate=collate,
        sources=sources,
        fingerprint=fingerprint,
        formats=frozenset(tokenized.formats),
        repeated=repeated,
        **evaluation_fields(evaluation),
    )


def _kept(
    tokenized: TokenizedParts, table: datasets.Dataset, part: Part
) -> tuple[datasets.Dataset, DataSummary]:
    """Return the examples to use, and the counts of all, which are logged."""
    columns = {name: column(table, name) for name in SUMMARISED}
    summary = summarise(columns)
    with part.listed.named_in_errors():
        summary.require_examples(str(part.source))
    is_kept = columns["outcome"] == Outcome.KEPT
    if not is_kept.all():
        table = table.select(np.flatnonzero(is_kept))
    summary.log(f"{'Training' if part.is_train else 'Held-out'} data {part.source}", tokenized.limits)
    examples = MappedExamples(table, shuffle=False)
    if part.is_train:
        tokenized.look_at(examples.head(NUM_EXAMPLES_TO_LOOK_AT))
    has_unused = columns["unused_fields"][is_kept] > 0
    if has_unused.any():
        tokenized.show(examples.example(int(np.argmax(has_unused))), OF_UNUSED)
    return table, summary


def _mixed(
    tokenized: TokenizedParts,
    kept: Sequence[tuple[datasets.Dataset, DataSummary]],
    parts: Sequence[Part],
    num_read: Sequence[int],
    seed: int,
) -> tuple[MappedExamples, DataSummary, tuple[SourceCounts, ...]]:
    """Return the training examples of all sources, their counts, and those of each source if there are several."""
    listed = [part.listed for part in parts]
    if len(parts) == 1 and listed[0].repeats == 1:
        return *_examples(tokenized, *kept[0], is_train=True), ()
    table, sources = mixed(
        [table for table, _ in kept], listed, seed=seed, stopping_strategy=tokenized.config.stopping_strategy
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
            "An epoch has %s from %s, %s tokens, %.1f%% of all tokens (%s); their rows are examples %d to %d.",
            *(counted(one.examples, "example"), one.source, f"{one.tokens:,}", 100 * one.share, one.name),
            *(first_id, first_id + read - 1),
        )
    return *_examples(tokenized, table, summary, is_train=True, first_ids=first_ids[sources]), of_each


def _examples(
    tokenized: TokenizedParts,
    table: datasets.Dataset,
    summary: DataSummary,
    *,
    is_train: bool = False,
    first_ids: np.ndarray | None = None,
) -> tuple[MappedExamples, DataSummary]:
    """Return examples in the rows of an epoch, packed if the recipe says so, and their counts."""
    config, packed = tokenized.config, None
    if config.packing:
        assert config.max_length is not None
        packed = pack_best_fit(column(table, "num_tokens").astype(np.int64), config.max_length)
        summary = replace(summary, num_rows=len(packed), row_capacity=config.max_length)
        logger.info("%s data: %s", "Training" if is_train else "Held-out", summary.packed_words)
    examples = MappedExamples(
        table,
        shuffle=config.shuffle and is_train,
        group_by_length=config.group_by_length and is_train,
        packed=packed,
        first_ids=first_ids,
    )
    return examples, summary


def _hold_out(table: datasets.Dataset, size: float, seed: int) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Split the table in two; the pieces of one document stay together."""
    sample_ids = column(table, "sample_id")
    candidates = np.unique(sample_ids)
    count = num_held_out(size, len(candidates))
    chosen = np.random.default_rng([seed, len(candidates)]).choice(candidates, count, replace=False)
    is_held_out = np.isin(sample_ids, chosen)
    return table.select(np.flatnonzero(~is_held_out)), table.select(np.flatnonzero(is_held_out))
