"""The rows that a run trains on, and those that it holds out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.files.reading import Source, open_rows
from lowmem_ft.data.sources.listed import ListedSource, listed_sources
from lowmem_ft.foundation.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Part:
    """The training rows of one source, or held-out ones.

    Args:
        listed: the source that the recipe lists, or whose rows are held out; its config says how they are read.
        source: the split to open.
        is_train: whether the rows are trained on.
    """

    listed: ListedSource
    source: Source
    is_train: bool

    def open(self) -> Any:
        """Open the rows; for training, no more than ``max_samples``."""
        rows: Any = open_rows(self.source)
        limit = self.listed.config.max_samples
        if limit is None or not self.is_train:
            return rows
        return rows.take(limit if self.source.streaming else min(limit, len(rows)))


def training_parts(config: DataConfig) -> list[Part]:
    """Return the training rows of each source."""
    return [
        Part(listed=listed, source=_source(listed.config), is_train=True) for listed in listed_sources(config)
    ]


def held_out_parts(config: DataConfig) -> list[Part]:
    """Return the held-out rows that have a file or a split of their own: of ``eval_path``, or of each source."""
    if config.eval_path is not None:
        source = Source(
            path=config.eval_path,
            split=config.eval_split or "train",
            setting="data.eval_path",
            split_setting="data.eval_split",
            streaming=config.streaming,
            sample_by=config.sample_by,
        )
        return [Part(listed=ListedSource(name="eval", config=config), source=source, is_train=False)]
    if config.eval_split is None:
        return []
    changes = {"split": config.eval_split, "split_setting": "data.eval_split"}
    return [
        replace(part, source=replace(part.source, **changes), is_train=False)
        for part in training_parts(config)
    ]


def parts_of(config: DataConfig) -> Iterator[Part]:
    """Yield the training rows of each source, then the held-out rows."""
    yield from training_parts(config)
    yield from held_out_parts(config)


def _source(config: DataConfig) -> Source:
    assert config.path is not None
    return Source(
        path=config.path,
        split=config.split,
        name=config.name,
        revision=config.revision,
        data_files=config.data_files,
        streaming=config.streaming,
        sample_by=config.sample_by,
    )


def num_held_out(size: float, num_examples: int) -> int:
    """Return how many of ``num_examples`` examples ``data.eval_size`` holds out.

    Args:
        size: a number of examples, or below 1 a share of them.
        num_examples: number of examples to choose from.

    Raises:
        DataError: if none would be left to train on.
    """
    count = int(size) if size >= 1 else max(1, round(size * num_examples))
    if count >= num_examples:
        raise DataError(
            f"data.eval_size must leave at least one example to train on, got {size:g} of {num_examples}. Set it "
            "lower."
        )
    return count
