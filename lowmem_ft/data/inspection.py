"""A look at training data as a model reads it: rows with masks, lengths, losses by limit, padding, warnings.

Axes: R rows, T tokens of one example.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.batches.epoch_rows import MappedExamples
from lowmem_ft.data.batches.order import epoch_order
from lowmem_ft.data.batches.packing import pack_best_fit
from lowmem_ft.data.batches.padding import Padding, padding_of
from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.length_profile import Cut, LengthProfile
from lowmem_ft.data.loading import load_data
from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.data.repeated_rows import RepeatedRows
from lowmem_ft.data.row import IGNORED_LABEL, TokenizedExample
from lowmem_ft.data.text.marked_pieces import Piece, marked_pieces
from lowmem_ft.data.tokenized_parts import SHOWS_ROW
from lowmem_ft.foundation.system.log_capture import log_heard

STREAMED_EXAMPLES = 1000
"""Examples of a stream that are looked at."""

SHOWN_TOKENS = 400
"""Tokens of a row that are shown, half from each end."""

FEWEST_TOKENS_OF_TABLE, MOST_BARS = 512, 12

Why = Literal["first", "longest", "cut"]


@dataclass(frozen=True)
class Warned:
    """A warning that training logs of the same data, too; ``check`` is the name of the template check, if one did."""

    check: str | None
    words: str


@dataclass(frozen=True, kw_only=True)
class ShownRow:
    """An example as the model reads it.

    Args:
        example: its index among the rows of the source.
        why: the reason to show it.
        num_tokens: tokens before it is cut.
        num_labels: learnt tokens before it is cut.
        num_read: tokens that the model reads.
        labels_lost: learnt tokens that it does not read.
        begin: text of its first tokens.
        num_left_out: tokens between ``begin`` and ``end``, which are read and not shown.
        end: text of its last tokens that are read.
    """

    example: int
    why: Why
    num_tokens: int
    num_labels: int
    num_read: int
    labels_lost: int
    begin: tuple[Piece, ...]
    num_left_out: int
    end: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The findings on training data, tokenized as in training.

    Args:
        notes: what training logs of the data, without warnings.
        warnings: what training warns of.
        rows: some of the rows.
        bins: rows by their tokens before anything is cut: fewest and most tokens, and the number of rows.
        cuts: what limits would cut, by their length; the recipe's own among them.
        max_length: the recipe's own limit within the model's; None: there is no limit.
        paddings: the padding of an epoch, by the settings that differ from the recipe's; it comes first, as "".
        rows_per_batch: rows of a micro-batch.
        splits: whether examples are raw text, which is split at a limit.
        is_mixed: whether the examples are raw text in part, which ``cuts`` counts as if it were cut.
        num_streamed: examples looked at of a stream; None: all were.
        repeated: counts of equal rows; None: a stream, where they are not looked for.
    """

    notes: tuple[str, ...]
    warnings: tuple[Warned, ...]
    rows: tuple[ShownRow, ...]
    bins: tuple[tuple[int, int, int], ...]
    cuts: tuple[Cut, ...]
    num_labels: int
    num_tokens: int
    num_examples: int
    max_length: int | None
    paddings: Mapping[str, Padding]
    rows_per_batch: int
    splits: bool
    is_mixed: bool
    num_streamed: int | None
    repeated: RepeatedRows | None

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON types."""
        return {
            "schema": 1,
            **asdict(self),
            "bins": [dict(zip(("from", "to", "rows"), each, strict=True)) for each in self.bins],
            "paddings": [
                {"settings": settings, **asdict(padding), "share": padding.share}
                for settings, padding in self.paddings.items()
            ],
        }


def inspect_data(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_positions: int | None,
    vocab_size: int | None,
    end_token_ids: Collection[int] | None,
    seed: int,
    rows_per_batch: int,
    show: int,
) -> Inspection:
    """Tokenize a run's data as training does, and return what the model reads.

    The result of tokenizing is cached, and training finds it. Where ``data.max_length`` cuts rows, they are tokenized a
    second time, whole.

    Args:
        config: the recipe's ``data``.
        tokenizer: as for :func:`~lowmem_ft.data.loading.load_data`, like the next five.
        max_positions: longest input of the model in tokens; None: unknown, or without a limit.
        vocab_size: rows of the model's embedding; None: not checked.
        end_token_ids: tokens at which generation stops; None: unknown.
        seed: the run's seed.
        rows_per_batch: rows of a micro-batch.
        show: number of the first, and of the cut rows to show; if it is not 0, the longest is shown, too.

    Raises:
        DataError: if training would refuse the data.
    """
    heard: list[logging.LogRecord] = []

    def load(config: DataConfig, limit: int | None) -> PreparedData:
        return load_data(
            config,
            tokenizer,
            max_positions=limit,
            seed=seed,
            attn_implementation="sdpa",
            vocab_size=vocab_size,
            end_token_ids=end_token_ids,
        )

    with log_heard(logging.INFO, heard.append):
        data = load(config, max_positions)
        if data.summary is None:
            data.train.head(STREAMED_EXAMPLES)  # it logs what is lost
    is_whole = data.summary is not None and not data.summary.num_cut
    with log_heard(logging.CRITICAL, heard.append):
        plain = load(replace(config, packing=False), max_positions) if config.packing else data
        uncut = replace(config, packing=False, max_length=None, eval_path=None, eval_split=None)
        whole = _Examples.of(plain if is_whole else load(uncut, None))
    max_length = data.collate.max_length
    splits = data.formats == {"text"}
    profile = LengthProfile(whole.masks(), splits=splits)
    pieces = _Examples.of(plain) if splits else whole
    return Inspection(
        notes=tuple(_notes(heard)),
        warnings=tuple(_warnings(heard)),
        rows=tuple(_shown(pieces, tokenizer, max_length, show)),
        bins=tuple(_bins(profile.lengths_R)),
        cuts=tuple(map(profile.cut_at, _limits(profile.longest, max_length, max_positions))),
        num_labels=profile.num_labels,
        num_tokens=int(profile.lengths_R.sum()),
        num_examples=len(profile.lengths_R),
        max_length=max_length,
        paddings=_paddings(profile.row_lengths(max_length), config, data.collate, seed, rows_per_batch),
        rows_per_batch=rows_per_batch,
        splits=splits,
        is_mixed="text" in data.formats and not splits,
        num_streamed=len(profile.lengths_R) if data.summary is None else None,
        repeated=data.repeated,
    )


def _notes(heard: Iterable[logging.LogRecord]) -> Iterator[str]:
    """Yield what was logged about the data, except the rows shown."""
    for record in heard:
        if record.levelno < logging.WARNING and not getattr(record, SHOWS_ROW, False):
            yield record.getMessage()


def _warnings(heard: Iterable[logging.LogRecord]) -> Iterator[Warned]:
    """Yield what was warned about."""
    for record in heard:
        if record.levelno >= logging.WARNING:
            yield Warned(getattr(record, "check", None), record.getMessage())


@dataclass(frozen=True)
class _Examples:
    """Examples to show and to count, in a table or from a stream."""

    lengths_R: np.ndarray
    read: Callable[[int], TokenizedExample]
    masks: Callable[[], Iterable[tuple[np.ndarray, np.ndarray]]]

    @classmethod
    def of(cls, data: PreparedData) -> _Examples:
        """Return the examples of unpacked data; for a stream, its first ones."""
        train = data.train
        if isinstance(train, MappedExamples):
            return cls(train.row_lengths, lambda index: train.read(index)[0], train.masks)
        found = train.head(STREAMED_EXAMPLES)
        lengths_R = np.array([len(example.input_ids_T) for example in found])
        mask_T = np.concatenate([example.labels_T != IGNORED_LABEL for example in found])
        return cls(lengths_R, found.__getitem__, lambda: [(lengths_R, mask_T)])


def _shown(
    examples: _Examples, tokenizer: PreTrainedTokenizerBase, max_length: int | None, show: int
) -> Iterator[ShownRow]:
    """Yield the rows to show, each once."""
    if not show:
        return
    lengths_R = examples.lengths_R
    chosen: dict[int, Why] = dict.fromkeys(range(min(show, len(lengths_R))), "first")
    chosen.setdefault(int(np.argmax(lengths_R)), "longest")
    cut = [] if max_length is None else np.flatnonzero(lengths_R > max_length).tolist()
    chosen |= dict.fromkeys([index for index in cut if index not in chosen][:show], "cut")
    for index, reason in chosen.items():
        yield _shown_row(examples.read(index), reason, tokenizer, max_length)


def _shown_row(
    example: TokenizedExample, why: Why, tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> ShownRow:
    ids_T, is_learnt_T = example.input_ids_T, example.labels_T != IGNORED_LABEL
    num_read = min(len(ids_T), max_length or len(ids_T))
    half = SHOWN_TOKENS // 2
    parts = (
        [slice(0, num_read)]
        if num_read <= SHOWN_TOKENS
        else [slice(0, half), slice(num_read - half, num_read)]
    )
    begin, *end = (tuple(marked_pieces(ids_T[part], is_learnt_T[part], tokenizer)) for part in parts)
    return ShownRow(
        example=example.sample_id,
        why=why,
        num_tokens=len(ids_T),
        num_labels=int(is_learnt_T.sum()),
        num_read=num_read,
        labels_lost=int(is_learnt_T[num_read:].sum()),
        begin=begin,
        num_left_out=num_read - 2 * half if end else 0,
        end=end[0] if end else (),
    )


def _limits(longest: int, max_length: int | None, max_positions: int | None) -> list[int]:
    """Return the limits to compare: powers of two up to one that cuts nothing, and the recipe's own."""
    most = longest if max_positions is None else min(longest, max_positions)
    least = min(FEWEST_TOKENS_OF_TABLE, _power_of_two(most) // 4)
    powers = itertools.takewhile(
        lambda limit: limit < 2 * most, (least << shift for shift in itertools.count())
    )
    limits = {limit for limit in (*powers, max_length or most) if limit >= 2}
    if max_positions is not None and longest > max_positions:
        limits = {limit for limit in limits if limit < max_positions} | {max_positions}
    return sorted(limits)


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def _bins(lengths_R: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Yield the bins of a histogram: all of one width, or each twice as wide as the last if some rows are long."""
    least, most = int(lengths_R.min()), int(lengths_R.max())
    if most > 8 * np.median(lengths_R):
        powers = [1 << shift for shift in range(most.bit_length() + 1)]
        ends = [power for power in powers if least <= power < 2 * most][-MOST_BARS:]
        start = ends[0] // 2 + 1 if least > ends[0] // 2 else 1
    else:
        step = _round_step((most - least + 1) / MOST_BARS)
        start = (least - 1) // step * step + 1
        ends = list(range(start + step - 1, most + step, step))
    for end in ends:
        yield start, end, int(((lengths_R >= start) & (lengths_R <= end)).sum())
        start = end + 1


def _round_step(least: float) -> int:
    """Return the least of 1, 2, 5, 10, 20, 50 and so on that is not below a number."""
    return next(
        factor * 10**power
        for power in itertools.count()
        for factor in (1, 2, 5)
        if factor * 10**power >= least
    )


def _paddings(
    lengths_R: np.ndarray, config: DataConfig, collate: Collator, seed: int, rows_per_batch: int
) -> dict[str, Padding]:
    """Return the first epoch's padding with the recipe's batching and with every other way to batch its examples."""

    def padding(*, packing: bool, group_by_length: bool) -> Padding:
        rows_R = lengths_R
        if packing:
            assert collate.max_length is not None, "packing needs a limit"
            packed = pack_best_fit(lengths_R, collate.max_length)
            rows_R = np.add.reduceat(lengths_R[packed.members], packed.offsets[:-1])
        order = epoch_order(
            rows_R, seed=seed, epoch=0, shuffle=config.shuffle, group_by_length=group_by_length
        )
        return padding_of(rows_R[order], rows_per_batch, replace(collate, packed=packing).padded_length)

    found = {"": padding(packing=config.packing, group_by_length=config.group_by_length)}
    if config.packing:
        found["data.packing=false"] = padding(packing=False, group_by_length=False)
        return found
    if not config.group_by_length and config.shuffle and not config.streaming:
        found["data.group_by_length=true"] = padding(packing=False, group_by_length=True)
    if collate.max_length is not None:
        off = " data.group_by_length=false" if config.group_by_length else ""
        found[f"data.packing=true{off}"] = padding(packing=True, group_by_length=False)
    return found
