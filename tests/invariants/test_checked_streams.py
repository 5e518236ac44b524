"""Every ordering of copies that is left out makes a race that a virtual GPU finds, or is made by others as well."""

from __future__ import annotations

from ground_truth import small_visits
from ground_truth.checked_streams import leave_out_each, orders_of_visits, visited_gpu

from lowmem_ft.foundation.host import pinned_memory
from lowmem_ft.foundation.host.copy_engine import CopyEngine

NOT_NEEDED = {
    "self._inward.synchronize() < head.py held_gradient": "who reads a gradient waits for both directions",
    "embedding.py _rows_on_device: self._copied.synchronize()": "pageable rows have left when their copy is made",
}
"""What adds an order that nobody relies on."""

IMPLIED = {
    "_free_buffer < _stage_out": "_unload has waited for the same copy",
    "_let_go < synchronize": "the host waits for the same copies in the next line",
    "head.py _forget_others": "computing next waits for a later copy of the same stream",
    "optimizer_offload.py _next_slot": "a slot that nobody has visited was empty all along",
    "optimizer_offload.py <genexpr>": "whoever had the memory of a new slot has been waited for by then",
    "put off waits for return CopyEvent(self._compute.record_event()) if self.is_asynchronous else CopyEvent() "
    "< to_device < activation_offload.py _sent_for": "the visit has read what lay in that memory before",
    "synchronize() < the program": "a visit has waited for its last copy itself",
}
"""Orderings of the visits that others make as well, and which."""


def test_each_ordering_that_is_left_out_is_found_or_implied():
    findings = leave_out_each(orders_of_visits())
    assert findings.num_false_alarms == 0
    assert len(findings.found) >= 65
    assert any("_wait_for_arrival" in str(edge) and "< forget " in str(edge) for edge in findings.found)
    unexplained = [str(edge) for edge in findings.missed if not any(key in str(edge) for key in NOT_NEEDED)]
    assert unexplained == []
    assert len(findings.missed) == len(NOT_NEEDED)
    assert [str(edge) for edge in findings.implied if not any(key in str(edge) for key in IMPLIED)] == []


def test_memory_that_goes_without_waiting_for_its_copies_is_found(monkeypatch):
    monkeypatch.setattr(pinned_memory, "_unregister", lambda synchronize, unregister: unregister())
    [race] = visited_gpu(small_visits.memory_that_goes_while_it_is_copied, pins=True).races
    assert (race.kind, race.second.operator) == ("free after read", "cudaHostUnregister")
    assert "gives back 4.00 KiB of pinned memory" in str(race)


def test_weights_that_the_host_gets_back_while_they_are_copied_are_found(monkeypatch):
    """``LayerSlab.materialize`` gives them to whoever saves: on a virtual GPU nobody is seen to read them."""
    monkeypatch.setattr(CopyEngine, "synchronize", lambda self: None)
    races = visited_gpu(small_visits.layers_that_are_updated_at_once, pins=True).races
    assert {race.second.operator for race in races} == {"use"}
