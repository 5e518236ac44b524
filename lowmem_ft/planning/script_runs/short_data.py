"""Data shortened to what a few steps need, where a script would process all of it first.

Rows are left out where ``datasets`` computes new ones from them (``map``, ``filter``); reading and slicing cost nothing
and stay as they are. Rows that a script selects by number after that are selected from the remaining ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported

FEWEST_ROWS = 512
ROWS_A_ROW = 8
"""Rows of text kept for each row of the steps: many short texts may make one row, and a filter drops some."""


class DataCut:
    """Shortens data to the rows that the steps need.

    Args:
        num_steps: steps that the script will take, those of all its processes added up.
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
        for name, around in (
            ("map", self._compute_few),
            ("filter", self._compute_few),
            ("select", self._select_within),
            ("train_test_split", self._split_by_shares),
        ):
            wrap_when_imported(undo, "datasets.arrow_dataset", "Dataset", name, around)
        # In both places once the whole package is there, which else would itself import what datasets.load has by then.
        for owner in ("load", ""):
            wrap_when_imported(undo, "datasets", owner, "load_dataset", self._announce_reading)

    def _announce_reading(self, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._on_reading()
        return load(*args, **kwargs)

    def _compute_few(self, compute: Callable[..., Any], dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if len(dataset) > self.most_rows:
            self.rows_left_out += len(dataset) - self.most_rows
            dataset = dataset.select(range(self.most_rows))
        in_this_process = {"num_proc": None, "keep_in_memory": True, "load_from_cache_file": False}
        return compute(dataset, *args, **{**kwargs, **in_this_process, "cache_file_name": None})

    def _select_within(
        self, select: Callable[..., Any], dataset: Any, indices: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.rows_left_out and not isinstance(indices, range | list):
            indices = list(indices)
        if self.rows_left_out and len(indices) and max(indices) >= len(dataset):
            indices = [index % len(dataset) for index in indices][: len(dataset)]
        return select(dataset, indices, *args, **kwargs)

    def _split_by_shares(
        self,
        split: Callable[..., Any],
        dataset: Any,
        test_size: Any = None,
        train_size: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Turn parts given as numbers of rows into equally large shares of the remaining rows."""
        sizes = {"test_size": test_size, "train_size": train_size}
        numbers = [size for size in sizes.values() if isinstance(size, int)]
        if self.rows_left_out and sum(numbers) >= len(dataset):
            whole = len(dataset) + self.rows_left_out
            for name, size in sizes.items():
                if isinstance(size, int):
                    sizes[name] = max(1, min(len(dataset) // 2, size * len(dataset) // whole))
        return split(dataset, **sizes, **kwargs)
