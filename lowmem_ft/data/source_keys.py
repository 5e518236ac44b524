"""The keys of one of several sources in ``data.sources``: those of ``data`` under the same names, and its share.

Nothing here is imported from ``datasets`` or torch, so that a wrong key is reported before either.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

OF_A_SOURCE = (
    *(
        "path",
        "name",
        "revision",
        "data_files",
        "split",
        "sample_by",
        "max_samples",
        "format",
        "messages_column",
    ),
    *("prompt_column", "input_column", "completion_column", "text_column", "system_prompt", "loss_on"),
)
"""Keys of ``data`` that a source may set for itself; it has the value of ``data`` for each that it leaves out."""

SHARES = ("weight", "repeats")
"""Keys that say how much of an epoch a source is."""

MOST_REPEATS, MOST_WEIGHT = 10_000, 1e9

EXAMPLE = "[{path: a.jsonl}, {path: b.jsonl, repeats: 2}]"

_NAMED = re.compile(rf"\bdata\.({'|'.join(OF_A_SOURCE)})\b")


def in_source(problem: str, index: int) -> str:
    """Return a sentence about keys of ``data`` as one about those of a source."""
    return _NAMED.sub(rf"data.sources[{index}].\1", problem)


def without_paths(sources: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return sources without the places where they are stored."""
    return None if sources is None else [{k: v for k, v in one.items() if k != "path"} for one in sources]


def source_problems(sources: Sequence[Mapping[str, Any]], *, streaming: bool) -> Iterator[str]:
    """Yield the rules that a list of sources breaks by itself, before any file is read."""
    if not sources:
        yield f"data.sources names at least one source, got an empty list. Write it as {EXAMPLE}, or set it to null."
    weighted = [index for index, source in enumerate(sources) if source.get("weight") is not None]
    if 0 < len(weighted) < len(sources):
        yield (
            f"Weights are shares of one another: every source of data.sources has a weight or none, got "
            f"{len(weighted)} of {len(sources)}. Add the others, or use repeats."
        )
    for index, source in enumerate(sources):
        yield from _problems_of_one(source, f"data.sources[{index}]", streaming=streaming)
    if streaming and len(sources) > 1 and not weighted:
        yield without_weights(len(sources))


def without_weights(num_sources: int) -> str:
    """Return what is wrong with a stream of several sources that have no weights."""
    return (
        f"data.streaming=true draws each example from one of {num_sources} sources whose sizes it does not know, so "
        "data.sources needs a weight for each, such as [{path: a.jsonl, weight: 1}, {path: b.jsonl, weight: 2}]. Add "
        "them, or set data.streaming=false."
    )


def _problems_of_one(source: Mapping[str, Any], key: str, *, streaming: bool) -> Iterator[str]:
    weight, repeats = source.get("weight"), source.get("repeats")
    if not source.get("path"):
        yield f"{key}.path names the source, got {source.get('path')!r}. Write it as {EXAMPLE}."
    if weight is not None and not 0 < weight <= MOST_WEIGHT:
        yield (
            f"{key}.weight is above 0 and at most {MOST_WEIGHT:g}, got {weight:g}. Weights count in relation to one "
            "another; leave out a source that should not be read."
        )
    if repeats is not None and not 1 <= repeats <= MOST_REPEATS:
        yield (
            f"{key}.repeats is from 1 to {MOST_REPEATS:,}, got {repeats}. Leave out a source that should not be read."
        )
    if weight is not None and repeats is not None:
        yield f"{key} has both weight={weight:g} and repeats={repeats}, which contradict each other. Remove one."
    if repeats is not None and streaming:
        yield f"{key}.repeats={repeats} counts examples beforehand, which data.streaming=true cannot. Use weight."
    if source.get("max_samples") is not None and source["max_samples"] < 1:
        yield f"{key}.max_samples is at least 1, got {source['max_samples']}."
