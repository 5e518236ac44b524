"""Every ordering of copies is needed and tested: left out, each makes a race that is seen."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from ground_truth.copy_cases import CASES, build, in_small_pieces, read_all, steady, step, write_all
from ground_truth.late_copies import LateDevice, late_copies
from ground_truth.orderings import MODULES, all_orderings
from ground_truth.small_visits import VISITS

import lowmem_ft

ORDERINGS = {str(ordering): ordering for ordering in all_orderings()}
BY_A_RUN = steady(CASES["+ MLP and head in tiles"])


def races_of(visit, *, pins, when="at once"):
    with in_small_pieces(), late_copies(when, pins=pins) as device:
        visit(device)
    return device.races


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """What makes the races of a run whose copies are all there, taken from one step to the next."""
    folder = tmp_path_factory.mktemp("run")
    device = LateDevice("at once")
    with in_small_pieces(), device.standing_in():
        session = build(BY_A_RUN, folder, folder)
        step(session, 0)

    def races():
        device.forget()
        step(session, 1)
        if not device.races:
            read_all(session)
            write_all(session)
            step(session, 2)
        return device.races

    with in_small_pieces(), device.standing_in():
        assert races() == []

    def races_without(ordering):
        with in_small_pieces(), device.standing_in(), ordering.left_out():
            return races()

    return races_without


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("when", ["at once", "late", "random"])
@pytest.mark.parametrize("visit", VISITS, ids=lambda visit: visit.__name__)
def test_no_visit_makes_a_race(visit, when, pins):
    assert races_of(visit, pins=pins, when=when) == []


@pytest.mark.parametrize("name", ORDERINGS, ids=str)
def test_an_ordering_that_is_left_out_makes_a_race(name, a_run):
    ordering = ORDERINGS[name]
    with ordering.left_out():
        for pins, visit in itertools.product((True, False), VISITS):
            if races_of(visit, pins=pins):
                return
    assert a_run(ordering), f"nothing needs this: take it out, or add to small_visits.py what does. {name}"


def test_no_module_that_copies_is_left_out():
    package = Path(lowmem_ft.__file__).parent
    uses = re.compile(
        r"\bCopyEngine\(|\.(to_device|to_host)\(|CopyEvent\b.*copy_engine|copy_engine import.*CopyEvent"
    )
    found = {
        ".".join(("lowmem_ft", *path.relative_to(package).with_suffix("").parts))
        for path in package.rglob("*.py")
        if uses.search(path.read_text())
    }
    assert "lowmem_ft.techniques.streaming.layers" in found
    assert found - set(MODULES) == {
        "lowmem_ft.optimizers.chunked_optimizer",  # passes on what a home says
        "lowmem_ft.optimizers.state.state_storage",
    }


def test_orderings_of_every_kind_are_found():
    kinds = (
        "LayerStream._load: after slot.emptied",
        "LayerStream.visit: self._engine.wait(slot.filled)",
        "LayerStream._write_back: all computing before",
        "_KeptGradients.add: source of",
        "HostStorage._receive: visitor.slot.free = ...",
        "StreamedEmbedding._forward: self._written().synchronize()",
        "OffloadedTensor.__init__: self.on_device",
    )
    assert all(any(kind in name for name in ORDERINGS) for kind in kinds)
    assert len(ORDERINGS) == len(all_orderings())
