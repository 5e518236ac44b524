"""The data of a run, tokenized, with its counts."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lowmem_ft.data.batches.collating import Collator
from lowmem_ft.data.batches.epoch_rows import Examples
from lowmem_ft.data.mixing import JoinedExamples
from lowmem_ft.data.repeated_rows import RepeatedRows
from lowmem_ft.data.text.summary import DataSummary


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
        repeated: counts of equal rows; None when streaming.
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
    repeated: RepeatedRows | None = None


def evaluation_fields(by_source: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of :class:`PreparedData` for held-out examples, by the name of their source."""
    if len(by_source) < 2:
        return {"evaluation": next(iter(by_source.values()), None)}
    return {"evaluation": JoinedExamples(list(by_source.values())), "evaluation_by_source": by_source}


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """Return the fingerprint of tokens and labels."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array, dtype=np.int64).tobytes())
    return digest.hexdigest()[:16]
