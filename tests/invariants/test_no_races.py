"""No rung of the memory ladder uses memory in an order that streams and events leave open."""

from __future__ import annotations

import pytest
from ground_truth.checked_streams import checked_gpu
from ground_truth.copy_cases import CASES, steady
from ladder_rungs import RUNGS

SHORT = (*(rung.name for rung in RUNGS), "+ weights streamed, not clipped", "pageable, clipped")
"""All rungs; `slow` has all cases, at their full depth."""


@pytest.mark.parametrize("name", SHORT)
def test_no_rung_makes_a_race(name, tmp_path):
    gpu = checked_gpu(steady(CASES[name]), tmp_path, tmp_path)
    assert gpu.races == ()
    streams = {work.stream for work in gpu.work.entries if work.kind == "copy"}
    assert (len(streams) > 1) == any("offload" in setting for setting in CASES[name].settings)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_case_makes_a_race(name, tmp_path):
    if "adapters" in name:
        pytest.importorskip("peft")
        pytest.importorskip("bitsandbytes")
    assert checked_gpu(CASES[name], tmp_path, tmp_path).races == ()
