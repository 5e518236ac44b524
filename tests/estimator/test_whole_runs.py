"""What a process without a GPU was estimated to hold, beside every whole run of ``tests/data/measured``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ground_truth.whole_runs import WHOLE_RUNS, estimate_whole

from lowmem_ft.memory.comparison import estimated_peaks
from lowmem_ft.memory.uncertainty import CPU_PROCESS_SHARE

ROWS = json.loads((Path(__file__).parents[1] / "data" / "measured" / "whole-runs-cpu.json").read_text())
QUICK = ("tiny", "smollm2 8bit")
"""What `make test` tries."""


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in WHOLE_RUNS],
)
def test_whole_runs_stay_within_the_range_of_their_estimate(name, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)  # as where they were measured
    estimate = estimate_whole(name)
    expected, uncertain = estimated_peaks(estimate), estimate.process_range
    in_load = CPU_PROCESS_SHARE * estimate.host_by_part_at_peak["process"]
    rows = [row for row in ROWS if row["name"] == name]
    assert rows
    for measured in (repeat for row in rows for repeat in row["measured"]):
        assert uncertain.low_bytes <= measured["peak"] <= uncertain.high_bytes
        assert measured["step"] <= uncertain.high_bytes
        assert measured["load"] == pytest.approx(expected.by_phase["load"], abs=in_load)
