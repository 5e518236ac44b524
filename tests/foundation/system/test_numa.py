"""A process runs on the cores of its GPU's NUMA node, of those that it may use."""

from __future__ import annotations

import os

import pytest

from lowmem_ft.foundation.system import numa

GPU = "0000:c1:00.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Return a function that builds a machine's tables; the last affinity set is the function's ``cores``."""
    folder = tmp_path / "sys/bus/pci/devices" / GPU
    folder.mkdir(parents=True)

    def near(ranges, *, allowed):
        (folder / "local_cpulist").write_text(f"{ranges}\n")
        near.cores = set(allowed)
        return numa.run_near(GPU, root=tmp_path)

    monkeypatch.setattr(os, "sched_getaffinity", lambda process: near.cores)
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: setattr(near, "cores", set(cores)))
    return near


def test_a_process_runs_on_the_cores_of_its_gpus_node(machine):
    assert machine("2-3,6", allowed=range(8)) == {2, 3, 6} == machine.cores


def test_cores_that_a_scheduler_forbids_stay_forbidden(machine):
    assert machine("0-3", allowed=[2, 3, 4, 5]) == {2, 3} == machine.cores


@pytest.mark.parametrize("ranges", ["0-7", "", "8-15"], ids=["one node", "no table", "none that it may use"])
def test_nothing_changes_where_there_is_nothing_to_choose(ranges, machine):
    assert machine(ranges, allowed=range(8)) == frozenset()
    assert machine.cores == set(range(8))


def test_an_unknown_device_changes_nothing(tmp_path):
    before = os.sched_getaffinity(0)
    assert numa.run_near("ffff:ff:1f.0", root=tmp_path) == frozenset()
    assert os.sched_getaffinity(0) == before
