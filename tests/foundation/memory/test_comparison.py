"""An estimate beside what was measured, in the same terms."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lowmem_ft.foundation.memory.comparison import Peaks, compared, typical_seconds
from lowmem_ft.foundation.units import GIB

MEASURED = Peaks(
    peak_bytes=10 * GIB,
    host_peak_bytes=3 * GIB,
    reserved_bytes=11 * GIB,
    by_phase={"load": 5 * GIB, "step": 10 * GIB},
    by_category={"parameter": 4 * GIB, "optimizer_state": 2 * GIB},
    step_seconds=2.0,
)


def test_an_error_is_a_share_of_what_was_measured():
    estimated = dataclasses.replace(MEASURED, peak_bytes=11 * GIB, step_seconds=1.5)
    rows = {row.name: row for row in compared(estimated, MEASURED)}
    assert rows["peak of tensors"].error == pytest.approx(0.1)
    assert str(rows["peak of tensors"]) == "peak of tensors: estimated 11.0 GiB, measured 10.0 GiB (+10.0%)"
    assert str(rows["seconds a step"]) == "seconds a step: estimated 1.5 s, measured 2 s (-25.0%)"
    assert [row.name for row in rows.values() if not row.is_part] == [
        "peak of tensors",
        "reserved by the allocator",
        "host memory",
        "seconds a step",
    ]


def test_what_one_of_the_two_does_not_know_has_no_error():
    rows = list(compared(None, dataclasses.replace(MEASURED, reserved_bytes=None)))
    assert rows[0].name == "peak of the process"
    assert {row.error for row in rows} == {None}
    assert "estimated -" in str(rows[0])


def test_peaks_come_back_from_json():
    assert Peaks.from_json(json.loads(json.dumps(MEASURED.to_json()))) == MEASURED
    with pytest.raises(TypeError):
        Peaks.from_json({"peak": 1})


def test_a_first_step_is_not_typical():
    assert typical_seconds([60.0]) is None
    assert typical_seconds([60.0, 1.0, 2.0, 3.0]) == 2.0
