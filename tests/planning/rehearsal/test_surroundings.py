"""What a rehearsed run finds around it: the host of the machine it is for, and a terminal that nobody sees."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.system.host_limits import HostLimit
from lowmem_ft.foundation.system.process_size import HOST_BYTES_WITH_CUDA
from lowmem_ft.foundation.units import KIB
from lowmem_ft.planning.rehearsal.runtime import _RehearsedHost
from lowmem_ft.training.run import progress
from lowmem_ft.training.step import budget_cap


def test_budgets_are_held_against_the_host_it_is_for(rehearse, small, monkeypatch):
    """This machine is full and its process huge; the other one has 100 KiB more than the libraries take."""
    full = HostLimit(0, "this machine is full")
    monkeypatch.setattr(budget_cap, "tightest_host_limit", lambda budget_bytes, *, file_bytes: full)
    monkeypatch.setattr(budget_cap, "read_host_memory", lambda: pytest.fail("that is this machine's"))
    budget = f"budget.host={HOST_BYTES_WITH_CUDA // KIB + 100}KiB"
    on_host = ("offload.optimizer=host", "optimizer.state=fp32")
    found = rehearse(small(budget, *on_host), "rtx-4090", steps=2)
    assert not found.estimate.fits
    grown, peak = found.warnings
    assert grown.startswith(f"Host memory has grown to 2.44 GiB, above {budget}")
    assert peak.startswith(f"Peak host memory: 2.44 GiB, above {budget}")
    assert rehearse(small(budget), "rtx-4090", steps=2).warnings == ()


def test_the_host_it_is_for_holds_what_the_trace_has_put_there():
    timeline = Timeline()
    host = _RehearsedHost(timeline)
    timeline.malloc(Allocation(size_bytes=2**30))
    timeline.malloc(Allocation(size_bytes=2**30, place="disk"))
    first = timeline.malloc(Allocation(size_bytes=5, place="host"))
    timeline.malloc(Allocation(size_bytes=70, place="pinned"))
    timeline.free(first)
    assert host.held_bytes() - HOST_BYTES_WITH_CUDA == 70
    timeline.malloc(Allocation(size_bytes=1, place="host"))
    timeline.empty_cache()
    assert host.held_bytes() - HOST_BYTES_WITH_CUDA == 71
    assert host.peak_bytes(file_bytes=2**30) - HOST_BYTES_WITH_CUDA == 75


def test_the_runs_own_display_is_drawn_and_not_seen(rehearse, small, monkeypatch, capfd):
    drawn = []
    parts_of = progress._OneLine._parts

    def parts(self, task, *further, **options):
        drawn.append(task.completed)
        return parts_of(self, task, *further, **options)

    monkeypatch.setattr(progress._OneLine, "_parts", parts)
    rehearse(small(), "rtx-4090", steps=3)
    assert drawn[-1] == 3
    assert "step" not in "".join(capfd.readouterr())


def test_an_error_of_the_display_is_found(rehearse, small, monkeypatch):
    monkeypatch.setattr(progress, "format_bytes", lambda num_bytes: num_bytes.of_a_typo)
    with pytest.raises(AttributeError, match="of_a_typo"):
        rehearse(small(), "rtx-4090", steps=1)
