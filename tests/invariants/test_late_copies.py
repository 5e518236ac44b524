"""A run whose copies come late, or at random, is the run whose copies are done at once, bit for bit."""

from __future__ import annotations

import pytest
import torch
from ground_truth.copy_cases import CASES, build, in_small_pieces, outcome_of
from ground_truth.late_copies import DEVICE, LateDevice, late_copies

from lowmem_ft.host.copy_engine import CopyEngine
from lowmem_ft.host.pinned_memory import HostMemory

SHORT = (
    "+ weights streamed, not clipped",
    "all activations of stored layers",
    "adapters over 4 bits",
)
"""Between them every kind of copy with pinned memory; `slow` has the rest, and all of them at random."""
_slow = pytest.mark.slow


@pytest.fixture(scope="module")
def at_once(tmp_path_factory):
    """What a case comes to on a plain CPU."""
    outcomes = {}

    def outcome(case, disk_folder):
        if case not in outcomes:
            with in_small_pieces():
                outcomes[case] = outcome_of(build(case, tmp_path_factory.mktemp("plain"), disk_folder))
        return outcomes[case]

    return outcome


@pytest.mark.parametrize(
    "name, when",
    [
        *((name, "late") if name in SHORT else pytest.param(name, "late", marks=_slow) for name in CASES),
        *(pytest.param(name, "random", marks=_slow) for name in CASES),
    ],
)
def test_when_copies_are_made_changes_nothing(name, when, at_once, disk_folder, tmp_path):
    case = CASES[name]
    if "adapters" in name:
        pytest.importorskip("peft")
        pytest.importorskip("bitsandbytes")
    with in_small_pieces(), late_copies(when, pins=case.pins) as device:
        outcome = outcome_of(build(case, tmp_path, disk_folder))
    assert device.races == []
    assert (device.num_copies > 0) == any("offload" in setting for setting in case.settings)
    expected = at_once(case, disk_folder)
    assert outcome.losses == expected.losses
    assert outcome.tensors.keys() == expected.tensors.keys()
    different = [
        key for key, tensor in outcome.tensors.items() if not torch.equal(tensor, expected.tensors[key])
    ]
    assert different == []


def host_of(values):
    host = HostMemory(DEVICE, is_limited=False).allocate(len(values), torch.float32)
    return host.copy_(torch.tensor(values))


def test_a_late_copy_has_not_come_until_somebody_waits():
    with late_copies("late") as device:
        engine, host, here = CopyEngine(DEVICE), host_of([1.0, 2.0]), torch.zeros(2)
        arrived = engine.to_device(host, here)
        assert here.sum() == 0
        assert [race.split()[0] for race in device.races] == ["sum"]
        engine.wait(arrived)
        assert here.sum() == 3
        assert len(device.races) == 1


@pytest.mark.parametrize("when", ["at once", "late"])
def test_what_overtakes_computing_is_seen_though_computing_is_immediate(when):
    with late_copies(when) as device:
        engine, host, here = CopyEngine(DEVICE), host_of([0.0, 0.0]), torch.zeros(2)
        before = engine.now()
        here.add_(1)
        engine.to_host(here, host, after=[before])
    [race] = device.races
    assert race.endswith("does not wait for add_")


def test_a_source_that_is_freed_is_seen():
    with late_copies("late") as device:
        engine, host = CopyEngine(DEVICE), host_of([0.0, 0.0])
        engine.to_host(torch.ones(2), host, keep=False)
    assert any("memory is freed while it is in use" in race for race in device.races)
    assert any("memory is freed before" in race for race in device.races)


def test_what_the_host_reads_too_early_is_seen():
    with late_copies("at once") as device:
        engine, host = CopyEngine(DEVICE), host_of([0.0, 0.0])
        source = torch.ones(2)
        end = engine.to_host(source, host)
        host.sum()
        [race] = device.races
        assert race.startswith("sum does not wait")
        device.forget()
        engine.to_host(source, host)
        end.synchronize()  # of another copy
        host.sum()
        assert len(device.races) == 1


def test_two_parts_of_a_memory_do_not_wait_for_each_other():
    with late_copies("late") as device:
        engine, host, here = CopyEngine(DEVICE), host_of([1.0, 2.0]), torch.zeros(2)
        arrived = engine.to_device(host[:1], here[:1], after=[engine.now()])
        here[1:].add_(1)
        engine.wait(arrived)
    assert device.races == []


def test_pageable_memory_is_copied_by_the_host_when_somebody_waits():
    with late_copies("late", pins=False) as device:
        engine, host, here = CopyEngine(DEVICE), host_of([0.0, 0.0]), torch.zeros(2)
        assert not host.is_pinned()
        end = engine.to_device(host, here)
        host.copy_(torch.tensor([1.0, 2.0]))
        engine.wait(end)
        host.zero_()
        device.forget()
        assert here.sum() == 3


def test_the_device_checks_that_it_is_meant():
    with late_copies("late"), pytest.raises(RuntimeError, match="This device is cpu, got cuda"):
        LateDevice("late").current_stream(torch.device("cuda"))
