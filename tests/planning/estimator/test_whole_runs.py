"""What a process without a GPU was estimated to hold, beside every whole run of ``tests/data/measured``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from measuring.whole_runs import WHOLE_RUNS, estimate_whole
from sweeps import few_quick

ROWS = json.loads((Path(__file__).parents[2] / "data" / "measured" / "whole-runs-cpu.json").read_text())
MEASURED = sorted({row["name"] for row in ROWS})
QUICK = ("llama, streamed", "phi3 lora, dropout")
"""What `make test` tries."""

OFF_BY = 0.04
OFF_BY_IN = {"smollm2 8bit": 0.08}
"""Of bfloat16 weights that are read from a float32 checkpoint, why is not known."""


@pytest.mark.parametrize(
    "name",
    few_quick(MEASURED, QUICK),
)
def test_whole_runs_stay_within_the_range_of_their_estimate(name, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # as where they were measured
    estimate = estimate_whole(name)
    uncertain = estimate.process_range
    for measured in (repeat for row in ROWS if row["name"] == name for repeat in row["measured"]):
        assert uncertain.low_bytes <= measured["peak"] <= uncertain.high_bytes
        assert abs(estimate.process_peak_bytes / measured["peak"] - 1) <= OFF_BY_IN.get(name, OFF_BY)
        assert max(measured["load"], measured["step"]) <= uncertain.high_bytes


def test_there_are_measured_rows():
    assert set(QUICK) <= set(MEASURED) <= set(WHOLE_RUNS)
