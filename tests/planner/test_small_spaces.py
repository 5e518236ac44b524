"""Plans of a small model in small random spaces, against every combination there, estimated in full."""

from __future__ import annotations

import itertools

import bench_regret
import pytest

from lowmem_ft.planner.search.estimated_needs import Need


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))])
def test_a_plan_is_the_simplest_of_the_fastest_and_more_memory_is_never_slower(seed, tmp_path, monkeypatch):
    monkeypatch.setenv("LOWMEM_FT_TRACE_CACHE", str(tmp_path / "traces"))
    monkeypatch.setenv("LOWMEM_FT_TRACE_PROCESSES", "1")
    bench_regret.save_small_model(str(tmp_path / "model"))
    rows = bench_regret.compare(str(tmp_path / "model"), 1, seed, 20)
    assert [row["regret"] for row in rows] == [""] * len(rows), rows
    for smaller, larger in itertools.pairwise(rows):
        if smaller["plan_seconds"] is not None:
            assert larger["best_seconds"] <= smaller["best_seconds"]
            assert larger["plan_seconds"] <= smaller["plan_seconds"]


def test_what_a_plan_could_have_had_is_seen():
    def need(seconds: float, gib: float) -> Need:
        return Need(seconds=seconds, device_bytes=gib, host_bytes=1.0, fits=True)

    fitting = [(need(10.0, 9), 3), (need(10.04, 9), 1), (need(10.2, 9), 0)]
    assert bench_regret.regret_of(fitting, 10.04, 1) == ""
    assert bench_regret.regret_of(fitting, 10.0, 3) == "changes of 3, where 1 would do"
    assert bench_regret.regret_of([(need(10.0, 8), 3), *fitting], 10.0, 3) == "", "with less memory"
    assert bench_regret.regret_of(fitting, 10.2, 0) == "2.0% slower than the fastest"
    assert bench_regret.regret_of(fitting, None, 0)
    assert bench_regret.regret_of([], None, 0) == ""
