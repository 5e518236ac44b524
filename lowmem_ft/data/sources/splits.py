"""The rows that a run trains on, and those that it holds out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.sources.reading import Source, open_rows
from lowmem_ft.foundation.errors import DataError


def sources_of(config: DataConfig) -> tuple[Source, Source | None]:
    """Return the sources of the training rows, and of the held-out rows if they have a separate one."""
    assert config.path is not None
    train = Source(
        path=config.path,
        split=config.split,
        name=config.name,
        revision=config.revision,
        data_files=config.data_files,
        streaming=config.streaming,
        sample_by=config.sample_by,
    )
    if config.eval_path is not None:
        return train, Source(
            path=config.eval_path,
            split=config.eval_split or "train",
            setting="data.eval_path",
            split_setting="data.eval_split",
            streaming=config.streaming,
            sample_by=config.sample_by,
        )
    if config.eval_split is not None:
        return train, replace(train, split=config.eval_split, split_setting="data.eval_split")
    return train, None


def open_split(config: DataConfig, source: Source, *, is_train: bool) -> Any:
    """Open the rows of a source; for training data, no more than ``data.max_samples``."""
    rows: Any = open_rows(source)
    if config.max_samples is None or not is_train:
        return rows
    return rows.take(config.max_samples if config.streaming else min(config.max_samples, len(rows)))


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
