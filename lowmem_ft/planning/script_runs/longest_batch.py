"""The largest batch that a trainer would meet, looked for in its own data and brought into the steps that are traced.

The order is by the bytes of a batch's tensors, which tokens decide in text, and pictures or sound where there are some.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.virtual_gpu.upstream.data_loading import computed_for_real

MOST_SECONDS = 10.0
"""The longest time to look for it, over all trainings of a script."""

_TOKENS = "input_ids"


@dataclass(frozen=True, kw_only=True)
class LongestBatch:
    """The longest of the batches that were looked at.

    Args:
        tokens: its tokens, padding included; 0: it has none.
        num_bytes: bytes of its tensors.
        seen: batches looked at.
        of: batches that the training will take of an epoch.
    """

    tokens: int
    num_bytes: int
    seen: int
    of: int

    def __str__(self) -> str:
        tokens = f"{self.tokens:,} tokens, " if self.tokens else ""
        looked_at = (
            f"all {self.of:,} batches of an epoch"
            if self.seen == self.of
            else f"the first {self.seen:,} of {self.of:,} batches, looked at for {MOST_SECONDS:g} s at most"
        )
        return f"longest batch: {tokens}{format_bytes(self.num_bytes)} of tensors, of {looked_at}; it is in these steps"


class LongestBatchSearch:
    """Looks through the data of trainers.

    Attributes:
        found: the longest batch of the last training; None: it was not looked for.
        is_in_steps: whether no batch of the last training is longer than those that are traced.
    """

    def __init__(self) -> None:
        self.found: LongestBatch | None = None
        self.is_in_steps = False
        self._seconds_left = MOST_SECONDS

    def bring_forward(self, loader: Any, position: int, traced: int, taken: int | None) -> None:
        """Let the longest batch of an epoch be one of the first.

        Args:
            loader: a data loader, or accelerate's around one; it is changed for its first epoch.
            position: the place in the order that the batch changes with, unless the one there is as long.
            traced: batches that are traced.
            taken: batches that the training takes; None: all of each epoch.
        """
        self.found, self.is_in_steps = None, taken is not None and taken <= traced
        loader = getattr(loader, "base_dataloader", loader)
        if self.is_in_steps or loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            return
        sizes: list[tuple[int, int]] = []
        with computed_for_real(), torch.random.fork_rng(devices=[]):
            order = list(itertools.islice(loader.batch_sampler, taken))
            # A script's own code may fail here, and where it is called in training as well: there the error is shown.
            with contextlib.suppress(Exception):
                self._look_through(loader, order, sizes)
        if not sizes:
            return
        position = min(position, len(sizes) - 1)
        longest = max(range(len(sizes)), key=lambda at: (sizes[at][0], at == position))
        order[position], order[longest] = order[longest], order[position]
        object.__setattr__(
            loader, "batch_sampler", _FirstEpoch(loader.batch_sampler, order)
        )  # torch forbids it
        num_bytes, tokens = sizes[longest]
        self.found = LongestBatch(tokens=tokens, num_bytes=num_bytes, seen=len(sizes), of=len(order))
        self.is_in_steps = len(sizes) == len(order)

    def _look_through(
        self, loader: DataLoader[Any], order: list[list[int]], sizes: list[tuple[int, int]]
    ) -> None:
        """Add bytes and tokens of each batch, until the time is over."""
        rows: Any = loader.dataset
        fetch = getattr(rows, "__getitems__", None)
        ends_at = time.monotonic() + self._seconds_left
        for batch in order:
            fetched = [rows[row] for row in batch] if fetch is None else fetch(batch)
            sizes.append(_size(loader.collate_fn(fetched)))
            if time.monotonic() > ends_at:
                break
        self._seconds_left = max(0.0, ends_at - time.monotonic())


class _FirstEpoch:
    """The batches of a sampler, in an order of their own in the first epoch."""

    def __init__(self, sampler: Any, order: list[list[int]]) -> None:
        self._sampler = sampler
        self._order: list[list[int]] | None = order

    def __iter__(self) -> Iterator[list[int]]:
        order, self._order = self._order, None
        return iter(self._sampler if order is None else order)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def _size(batch: Any, name: str = "") -> tuple[int, int]:
    """Return the bytes of the tensors of a batch, and its tokens."""
    if isinstance(batch, Tensor):
        return batch.nbytes, batch.numel() if name.endswith(_TOKENS) else 0
    if isinstance(batch, Mapping):
        parts = [_size(part, str(name)) for name, part in batch.items()]
    else:
        parts = [_size(part) for part in batch] if isinstance(batch, (list, tuple)) else []
    return sum(part[0] for part in parts), sum(part[1] for part in parts)
