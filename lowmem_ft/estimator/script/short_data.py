"""Data shortened to what a few steps need, where a script would process all of it first.

Rows are left out where ``datasets`` computes new ones from them (``map``, ``filter``); reading and slicing cost nothing
and stay as they are. Rows that a script selects by number after that are selected from the remaining ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from lowmem_ft.upstream.on_import import when_imported
from lowmem_ft.upstream.patches import replace

FEWEST_ROWS = 512
ROWS_A_ROW = 8
"""Rows of text kept for each row of the steps: many short texts may make one row, and a filter drops some."""


class DataCut:
    """Shortens data to the rows that the steps need.

    Args:
        num_steps: steps that the script will take.
        on_reading: called as ``load_dataset`` begins, which reads all that it is given, however long that takes.
    """

    def __init__(self, num_steps: int, on_reading: Callable[[], None] = lambda: None) -> None:
        self.num_steps = num_steps
        self._on_reading = on_reading
        self.rows_per_step = 1
        self.rows_left_out = 0

    @property
    def most_rows(self) -> int:
        """The most rows that are processed."""
        return max(FEWEST_ROWS, ROWS_A_ROW * self.num_steps * self.rows_per_step)

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Shorten what a script computes from now on, until the stack is undone."""
        when_imported(undo, "datasets.arrow_dataset", functools.partial(self._adapt, undo))
        when_imported(undo, "datasets.load", functools.partial(self._announce_reading, undo))
        when_imported(undo, "datasets", functools.partial(self._announce_reading, undo))

    def _announce_reading(self, undo: contextlib.ExitStack, module: Any) -> None:
        load = module.load_dataset

        @functools.wraps(load)
        def load_dataset(*args: Any, **kwargs: Any) -> Any:
            self._on_reading()
            return load(*args, **kwargs)

        replace(undo, module, "load_dataset", load_dataset)

    def _adapt(self, undo: contextlib.ExitStack, module: Any) -> None:
        rows = module.Dataset
        replace(undo, rows, "map", self._of_few(rows.map))
        replace(undo, rows, "filter", self._of_few(rows.filter))
        replace(undo, rows, "select", self._within(rows.select))
        replace(undo, rows, "train_test_split", self._of_shares(rows.train_test_split))

    def _of_few(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compute)
        def compute_few(dataset: Any, *args: Any, **kwargs: Any) -> Any:
            if len(dataset) > self.most_rows:
                self.rows_left_out += len(dataset) - self.most_rows
                dataset = dataset.select(range(self.most_rows))
            in_this_process = {"num_proc": None, "keep_in_memory": True, "load_from_cache_file": False}
            return compute(dataset, *args, **{**kwargs, **in_this_process, "cache_file_name": None})

        return compute_few

    def _within(self, select: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(select)
        def select_within(dataset: Any, indices: Any, *args: Any, **kwargs: Any) -> Any:
            if self.rows_left_out and not isinstance(indices, range | list):
                indices = list(indices)
            if self.rows_left_out and len(indices) and max(indices) >= len(dataset):
                indices = [index % len(dataset) for index in indices][: len(dataset)]
            return select(dataset, indices, *args, **kwargs)

        return select_within

    def _of_shares(self, split: Callable[..., Any]) -> Callable[..., Any]:
        """Turn parts given as numbers of rows into equally large shares of the remaining rows."""

        @functools.wraps(split)
        def split_by_shares(
            dataset: Any, test_size: Any = None, train_size: Any = None, **kwargs: Any
        ) -> Any:
            sizes = {"test_size": test_size, "train_size": train_size}
            numbers = [size for size in sizes.values() if isinstance(size, int)]
            if self.rows_left_out and sum(numbers) >= len(dataset):
                whole = len(dataset) + self.rows_left_out
                for name, size in sizes.items():
                    if isinstance(size, int):
                        sizes[name] = max(1, min(len(dataset) // 2, size * len(dataset) // whole))
            return split(dataset, **sizes, **kwargs)

        return split_by_shares
