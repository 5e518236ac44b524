"""No rung of the memory ladder uses memory in an order that streams and events leave open."""

from __future__ import annotations

import pytest
from ground_truth.checked_streams import checked_gpu, kept_by, leave_out_each, orders_kept
from ground_truth.copy_cases import CASES, SHARED_CASES, steady
from ladder_rungs import RUNGS

from lowmem_ft.techniques.distributed.fully_sharded import FullySharded

SHORT = (*(rung.name for rung in RUNGS[3::2]), "+ weights streamed, not clipped", "pageable, clipped")
"""Every other rung from the first that copies on; `slow` has all cases, at their full depth."""


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


@pytest.fixture(scope="module")
def shared_orders(tmp_path_factory):
    """What each case of one process of two has told its checker."""
    folder = tmp_path_factory.mktemp("shared")
    with orders_kept():
        return {name: kept_by(checked_gpu(case, folder, folder)) for name, case in SHARED_CASES.items()}


def streams_that_write(order, file):
    """On which a file's lines write memory."""
    writes = [told for told in order.told if told.name == "access" and told.kwargs["writes"]]
    lines = [(told.args[1], [code.co_filename for code, _ in told.kwargs["what"].lines]) for told in writes]
    return {stream for stream, files in lines if any(other.endswith(file) for other in files)}


@pytest.mark.parametrize("name", SHARED_CASES)
def test_no_process_of_several_makes_a_race(name, shared_orders):
    order = shared_orders[name]
    assert order.conflicts == []
    beside = streams_that_write(order, "chunked_optimizer.py") - {None, 0}
    assert bool(beside) == name.endswith("not clipped"), "FSDP2's hooks run on its stream of reductions"


def test_orderings_of_updates_on_the_stream_of_reductions_are_needed(shared_orders):
    """Ours: those of FSDP2 itself are torch's to test."""
    findings = leave_out_each(order for name, order in shared_orders.items() if "in backward" in name)
    ours = ("optimizer_in_backward.py", "optimizer_offload.py")
    found = [str(edge) for edge in findings.found if any(module in str(edge) for module in ours)]
    assert len(found) >= 8
    assert any("end_backward" in edge for edge in found)
    assert [str(edge) for edge in findings.missed if any(module in str(edge) for module in ours)] == []


def test_a_head_that_is_gathered_for_nobody_is_overwritten_meanwhile(tmp_path, monkeypatch):
    """By its update in backward: FSDP2 sends for it ahead of time, and nobody waits for it."""
    monkeypatch.setattr(FullySharded, "spare_head_in_backward", lambda self: None)
    gpu = checked_gpu(SHARED_CASES["fsdp2, in backward, not clipped"], tmp_path, tmp_path)
    assert {(race.kind, race.module) for race in gpu.races} == {("write after read", "lm_head")}
