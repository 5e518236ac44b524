"""The virtual GPU beside runs that others measured on a real one and published."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from ground_truth.comparison import Comparison, summarize, table
from ground_truth.public_runs import PublicRun, estimate_run

FOLDER = Path(__file__).parents[1] / "data" / "measured"
ROWS = {row["name"]: row for file in FOLDER.glob("public-*.json") for row in json.loads(file.read_text())}

FEW = (
    "smollm2-135m none r32 2x512 sdpa-efficient 2026-09-15",
    "tinyllama-1.1b none r32 2x512 eager 2026-09-15",
    "tinyllama-1.1b nf4 r32 2x512 eager 2026-09-15",
)

ALLOCATED = 0.0075
"""The most that allocated bytes are off. Where nothing is quantised they are exact but for single blocks; loading 4-bit
weights leaves up to 8 MiB in blocks that are too large, another number in each measured run of one configuration."""
RESERVED = 0.01
RESERVED_QUANTISED = (0.03, 0.06)
"""The most that reserved bytes are off; of 4-bit weights, the median and the most below. Their loading decides it, and
differs between runs: one configuration was measured at 11746 and 13272 MiB (docs of the source)."""


def compare(row: Mapping[str, Any]) -> Iterator[Comparison]:
    estimated, measured = estimate_run(PublicRun.from_row(row)), row["measured"]
    pairs = [
        ("allocated", phase, num_bytes, estimated["allocated"][phase])
        for phase, num_bytes in measured["allocated"].items()
    ]
    pairs += [(metric, "run", measured[metric], estimated[metric]) for metric in ("reserved", "process")]
    for metric, phase, measured_bytes, estimated_bytes in pairs:
        yield Comparison(
            row=row["name"],
            metric=metric,
            phase=phase,
            measured_bytes=measured_bytes,
            estimated_bytes=estimated_bytes,
        )


def hold_together(rows: Iterable[Mapping[str, Any]]) -> None:
    comparisons = [comparison for row in rows for comparison in compare(row)]
    print(*table(comparisons), sep="\n")  # noqa: T201
    allocated = summarize(comparison for comparison in comparisons if comparison.metric == "allocated")
    assert allocated.worst <= ALLOCATED, allocated
    for metric in ("reserved", "process"):
        plain = [
            comparison
            for comparison in comparisons
            if comparison.metric == metric and not is_4_bit(comparison)
        ]
        assert summarize(plain).worst <= RESERVED, summarize(plain)
        quantised = [
            comparison for comparison in comparisons if comparison.metric == metric and is_4_bit(comparison)
        ]
        median, under = RESERVED_QUANTISED
        assert summarize(quantised).under <= under, summarize(quantised)
        if len(quantised) > len(FEW):
            assert summarize(quantised).median <= median, summarize(quantised)


def is_4_bit(comparison: Comparison) -> bool:
    return ROWS[comparison.row]["settings"]["quantization"] != "none"


def test_a_few_public_runs_are_met():
    hold_together(ROWS[name] for name in FEW)


@pytest.mark.slow
def test_every_public_run_is_met():
    hold_together(ROWS.values())
