"""Splits of data as tokens: a table from the cache, or a stream."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batches.epoch_rows import TokenizedStream
from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.files.cache_errors import full_cache
from lowmem_ft.data.files.reading import READING_ERRORS, Source, no_example, reading_error
from lowmem_ft.data.row import TokenizedExample
from lowmem_ft.data.sources.splits import Part
from lowmem_ft.data.text.chat_templates import require_chat_template
from lowmem_ft.data.text.format_choice import choose_loss_on, recognise_format
from lowmem_ft.data.text.formats import ExampleFormat
from lowmem_ft.data.text.no_tokenizer import NoTokenizer
from lowmem_ft.data.text.summary import LengthLimits, check_known_tokens, marked_text
from lowmem_ft.data.text.template_checks import NUM_CHECKED_EXAMPLES, log_template_problems
from lowmem_ft.data.text.tokenized_rows import tokenized_rows
from lowmem_ft.data.text.tokenizing import Tokenization
from lowmem_ft.data.text.unused_fields import columns_left, columns_to_read, keys_left

logger = logging.getLogger(__name__)

STREAMING_BATCH_ROWS = 64
NUM_EXAMPLES_TO_LOOK_AT = 32
"""Training examples checked before the first step: fewer than a streamed batch, which is tokenized anyway."""

SHOWS_ROW = "shows_row"
"""Attribute of the log record that shows an example; a report that shows examples itself leaves it out."""


@dataclass(frozen=True)
class TokenizedParts:
    """The splits of a run's data as tokens, all of them made in the same way."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    limits: LengthLimits
    end_token_ids: Collection[int] | None
    formats: set[str] = field(default_factory=set)

    def table(self, part: Part) -> datasets.Dataset:
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
                files = rows.cache_files
                if (
                    problem := full_cache(error, os.path.dirname(files[0]["filename"]) if files else None)
                ) is None:
                    raise
                raise problem from error

    def stream(self, part: Part) -> TokenizedStream:
        """Return the examples of a split, tokenized as they are read, including dropped ones."""
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
            show=self.show,
        )

    def look_at(self, examples: Sequence[TokenizedExample]) -> None:
        """Check that the tokenizer knows the text of the first examples, and show one."""
        check_known_tokens(examples, self.tokenizer)
        self.show(examples[0])

    def show(self, example: TokenizedExample, why: str = "") -> None:
        """Log an example as the model reads it."""
        text = marked_text(example.input_ids_T, example.labels_T, self.tokenizer)
        logger.info(
            "Example %d%s as the model reads it, learnt text between ⟦ and ⟧:\n%s",
            example.sample_id,
            why,
            text,
            extra={SHOWS_ROW: True},
        )

    def _tokenization(self, part: Part, first_row: dict[str, Any]) -> Tokenization:
        source, config = part.source, part.listed.config
        has_chat_template = self.tokenizer.chat_template is not None
        example_format = recognise_format(
            config, list(first_row), has_chat_template=has_chat_template, source=str(source)
        )
        if isinstance(self.tokenizer, NoTokenizer) and example_format.name != "tokens":
            self.tokenizer.refuse()
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
