"""What other processes estimate ahead changes when an answer is there, and nothing else."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.host_limits import HostLimit
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.estimating_processes import PROCESSES_VARIABLE, EstimatingProcess
from lowmem_ft.planning.planner import plan, planning
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.search import prefetch as ahead_module
from lowmem_ft.planning.planner.search.estimated_needs import Need
from lowmem_ft.planning.planner.search.prefetch import Asked, EstimatesAhead, num_processes_ahead

BUDGET = Budget(device="4GiB")


def _without_clock(values: Any) -> Any:
    """JSON without how long each trace took."""
    if isinstance(values, list):
        return [_without_clock(value) for value in values]
    if isinstance(values, dict):
        return {key: _without_clock(value) for key, value in values.items() if key != "trace_seconds"}
    return values


@pytest.fixture(scope="module")
def running():
    """A function that returns a process with its imports behind it, which take seconds: the last one while it runs."""
    started: list[EstimatingProcess] = []

    def process() -> EstimatingProcess:
        if not started or started[-1]._process.poll() is not None:
            started.append(EstimatingProcess())
        return started[-1]

    yield process
    for one in started:
        one.close()


@pytest.fixture
def kept_running(running, monkeypatch):
    """Let searches have that process, and let nobody end it."""
    monkeypatch.setattr(ahead_module, "EstimatingProcess", running)
    monkeypatch.setattr(EstimatingProcess, "close", lambda self: None)


def _alike(one: Need | None, other: Need) -> bool:
    assert one is not None
    mine, others = (need.estimate.to_json() for need in (one, other))
    return _without_clock(mine) == _without_clock(others) and one.effort == other.effort


@pytest.fixture
def target(make_recipe) -> Target:
    return Target.of(make_recipe(f"budget.device={BUDGET.device}"), "l4")


@pytest.fixture
def ahead(kept_running, target):
    with contextlib.closing(EstimatesAhead(1, target)) as processes:
        yield processes


def test_a_plan_is_the_same_with_another_process(kept_running, make_recipe, monkeypatch):
    keep = "plan.keep=[model,training,optimizer,offload,tiling,accumulation,checkpointing.mlp_activation]"
    recipe = make_recipe(keep, "training.per_device_train_batch_size=4")
    results, taken = [], []
    take = EstimatesAhead.take
    monkeypatch.setattr(
        EstimatesAhead, "take", lambda self, place: taken.append(take(self, place)) or taken[-1]
    )
    for num_processes in (0, 1):
        monkeypatch.setattr(planning, "num_processes_ahead", lambda number=num_processes: number)
        assert not any(taken)
        values = _without_clock(plan(recipe, BUDGET, "l4").to_json())
        del values["seconds"]
        results.append(values)
    assert results[0] == results[1]
    assert any(taken), "nothing was guessed rightly"


def test_an_estimate_made_elsewhere_is_the_same_and_its_failure_costs_nothing(ahead, make_recipe, target):
    counted = ("checkpointing.skip_last_layers",)
    recipes = {
        0: make_recipe(),
        1: make_recipe("checkpointing.mode=full", "checkpointing.skip_last_layers=1"),
        2: make_recipe("model.name_or_path=/gone"),
        3: make_recipe("data.max_length=256"),
    }

    def asked(place: int) -> Asked:
        return recipes[place], counted if place == 1 else ()

    ahead.guess(iter([0, 1]), asked)
    assert ahead.take(1) is None, "there is one process, which is busy with the likelier guess"
    assert _alike(ahead.take(0), target.need(recipes[0]))
    assert ahead.take(0) is None
    ahead.guess(iter([1]), asked)
    there = ahead.take(1)
    assert _alike(there, target.need(recipes[1], counted))
    assert there is not None
    assert there.recipe == recipes[1], "the layer fits"
    assert there.least is not None
    assert there.least.device_bytes < there.device_bytes

    ahead.guess(iter([2]), asked)
    assert ahead.take(2) is None, "who asks meets the reason, if it is one here too"

    ahead.guess(iter([3]), asked)
    for process in ahead._processes:
        process._process.kill()
    assert ahead.take(3) is None
    ahead.guess(iter([1]), asked)
    assert ahead.take(1) is None, "a process that fails once is not started again"


def test_nobody_waits_for_a_guess_that_is_not_asked_for(make_recipe, target):
    with contextlib.closing(EstimatesAhead(1, target)) as ahead:
        ahead.guess(iter([0]), lambda place: (make_recipe("data.max_length=1024"), ()))
    assert ahead._processes[0]._process.returncode, "it was not killed"
    assert ahead._guessed[0].exception() is not None, "it was waited for"


def test_there_are_as_many_processes_as_cores_and_memory_allow(monkeypatch):
    """Of a container's memory, which is less than the machine's."""

    def with_room(num_bytes: int) -> int:
        limit = HostLimit(num_bytes, "the container")
        monkeypatch.setattr(ahead_module, "tightest_host_limit", lambda budget_bytes: limit)
        return num_processes_ahead()

    monkeypatch.delenv(PROCESSES_VARIABLE, raising=False)
    monkeypatch.setattr("lowmem_ft.planning.estimator.estimating_processes.usable_cores", lambda: 16)
    assert [with_room(GIB), with_room(5 * GIB), with_room(500 * GIB)] == [0, 2, 3]
    monkeypatch.setenv(PROCESSES_VARIABLE, "2")
    assert num_processes_ahead() == 1
    monkeypatch.setenv(PROCESSES_VARIABLE, "1")
    assert num_processes_ahead() == 0
    monkeypatch.setenv(PROCESSES_VARIABLE, "many")
    with pytest.raises(
        UserError, match="LOWMEM_FT_TRACE_PROCESSES is a number of processes, at least 1, got 'many'"
    ):
        num_processes_ahead()
