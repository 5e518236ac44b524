"""A script's own search for a batch that fits: the sizes that it tries, and whether it handles errors out of memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

from lowmem_ft.foundation.upstream.import_hooks import wrap_when_imported

_CATCHES = re.compile(
    r"OutOfMemoryError|out of memory|^\s*except\s*:|^\s*except\b.*\b(RuntimeError|Exception|BaseException)\b",
    re.M,
)

MOST_FAILURES = 128
"""The most errors out of memory: Accelerate's search from a batch of 65,536 has fewer; a script may try for ever."""


class BatchSearch:
    """The batch sizes that a script tries.

    Attributes:
        is_one: whether a library searches for the script.
        batch_size: what it tries now; None: not known.
        failed: the sizes at which memory ran out, in order.
    """

    def __init__(self) -> None:
        self.is_one = False
        self.batch_size: int | None = None
        self.failed: list[int | None] = []

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Follow Accelerate's search, which is that of transformers, and trainers, until a stack is undone."""
        for module in ("accelerate.utils.memory", "accelerate.utils", "accelerate"):
            wrap_when_imported(undo, module, "", "find_executable_batch_size", self._search)
        wrap_when_imported(undo, "transformers.trainer", "Trainer", "train", self._train)

    def runs_out(self) -> None:
        """Note that memory has run out."""
        self.failed.append(self.batch_size)

    def __str__(self) -> str:
        """Return in words what has failed, and what the answer is for; empty if nothing has."""
        if not self.failed:
            return ""
        failed = [size for size, _ in itertools.groupby(self.failed)]
        if None in failed or self.batch_size in (None, *failed):
            times = f"{len(self.failed)} times" if len(self.failed) > 1 else "once"
            return f"out of memory: {times}, which the script handled; answered for what it did then"
        sizes = ", ".join(map(str, failed))
        several = "s" if len(failed) > 1 else ""
        return f"out of memory: at batch size{several} {sizes}; answered for {self.batch_size}"

    def to_json(self) -> dict[str, Any] | None:
        """Return the sizes at which memory ran out, and the last; None if it never did."""
        return {"batch_sizes": self.failed, "batch_size": self.batch_size} if self.failed else None

    def _search(
        self, find: Callable[..., Any], function: Callable[..., Any] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if function is None:
            return find(None, *args, **kwargs)
        self.is_one = True

        @functools.wraps(function)
        def attempt(batch_size: int, *its: Any, **named: Any) -> Any:
            self.batch_size = batch_size
            return function(batch_size, *its, **named)

        return find(attempt, *args, **kwargs)

    def _train(self, train: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        self.batch_size = trainer.args.train_batch_size
        return train(trainer, *args, **kwargs)


def may_handle_running_out(texts: Iterable[str]) -> bool:
    """Return whether some code might continue after an out-of-memory error."""
    return any(map(_CATCHES.search, texts))
