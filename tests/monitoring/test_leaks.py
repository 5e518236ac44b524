"""Leaks of each kind, planted where they often are: found, told apart, and their holders named."""

from __future__ import annotations

import gc
import json
import weakref

import pytest
import torch
from torch import nn

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.monitoring import LeakFinder, find_leaks
from lowmem_ft.monitoring.holders import holder_of

KEPT_BY_MODULE = []


class Model(nn.Module):
    """A training step, and what may be wrong with it."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.linear = nn.Linear(8, 8, device=device)
        self.history = []
        self.cache = {}
        self.x = torch.randn(4, 8, device=device)
        self.optimizer = torch.optim.AdamW(self.linear.parameters())
        self.num_steps = 0

    def step(self):
        loss = self.linear(self.x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.num_steps += 1


class Node:
    def __init__(self, held):
        self.itself = self
        self.held = held


def kinds(report):
    return {growth.site.rpartition(" ")[2]: growth for growth in report.growths}


@pytest.mark.parametrize("gpu", [pytest.param(None, marks=pytest.mark.slow), "t4"])
def test_a_clean_loop_has_no_leak(gpu):
    if gpu is None:
        assert find_leaks(Model().step).growths == ()
        return
    with VirtualGPU(gpu):
        assert find_leaks(Model("cuda").step).growths == ()


@pytest.mark.usefixtures("whole_heap")
def test_each_kind_is_found_and_told_apart():
    model = Model()
    in_closure = []

    def by_module():
        model.history.append(model.x + 1)

    def by_global():
        KEPT_BY_MODULE.append(model.linear.weight.norm())  # its graph has a tensor of the same storage

    def by_closure():
        in_closure.append(torch.zeros(50))

    def in_cycle():
        Node(torch.zeros(1000))

    def once():
        if model.num_steps == 3:
            model.cache["mask"] = torch.zeros(20)

    def grown_in_place():
        model.all = torch.cat([getattr(model, "all", torch.zeros(0)), torch.ones(5)])

    planted = (by_module, by_global, by_closure, in_cycle, once, grown_in_place)

    def step():
        model.step()
        for leak in planted:
            leak()

    try:
        report = find_leaks(step)
    finally:
        KEPT_BY_MODULE.clear()
    found = kinds(report)
    assert {name: growth.kind for name, growth in found.items()} == {
        "by_module": "leak",
        "by_global": "leak",
        "by_closure": "leak",
        "in_cycle": "cycle",
        "once": "once",
        "grown_in_place": "leak",
    }
    assert found["by_module"].bytes_per_step == 4 * 8 * 4
    assert found["by_module"].shapes == ((4, 8),)
    assert found["in_cycle"].bytes_per_step == 4000
    assert (found["once"].bytes_per_step, found["once"].count_per_step) == (80, 1)
    assert (found["grown_in_place"].bytes_per_step, found["grown_in_place"].count_per_step) == (20, 0)
    assert "model.history[1], local variable of test_each_kind" in found["by_module"].holder
    assert found["by_global"].holder.endswith("KEPT_BY_MODULE[1]")
    assert "graph" not in found["by_global"].holder
    assert "in_closure[1], local variable of test_each_kind" in found["by_closure"].holder
    assert found["in_cycle"].holder == "Node.held"
    assert "model.cache['mask']" in found["once"].holder
    assert "model.all" in found["grown_in_place"].holder
    table = report.table()
    assert max(map(len, table.splitlines())) <= 80
    for words in ("Leaks:", "Reference cycles:", "Grew once:", "test_leaks.py"):
        assert words in table
    assert len(json.loads(report.to_json())["growths"]) == 6


def step_with_a_closure():
    kept = []
    return lambda: kept.append(torch.zeros(10))


def test_a_closure_that_no_variable_leads_to_is_named():
    (growth,) = find_leaks(step_with_a_closure(), steps=2).leaks
    assert growth.holder.startswith(
        "step_with_a_closure.<locals>.<lambda> (its closure's `kept`)[1] (test_leaks.py:"
    )


def test_a_sum_of_losses_holds_all_their_graphs():
    model = Model()
    total = 0

    def step():
        nonlocal total
        total = total + model.linear(model.x * 2).exp().mean()

    report = find_leaks(step)
    assert {growth.kind for growth in report.growths} == {"leak"}
    assert sum(growth.bytes_per_step for growth in report.leaks) >= 2 * 4 * 8 * 4
    assert any(
        "the autograd graph of total, local variable of test_a_sum" in growth.holder
        for growth in report.leaks
    )


def test_a_list_of_losses_holds_their_graphs_on_a_virtual_gpu():
    with VirtualGPU("t4"):
        model = Model("cuda")
        losses = []
        report = find_leaks(lambda: losses.append(model.linear(model.x * 2).exp().mean()))
        assert report.leaks[0].device == "vgpu:0"
        assert all("losses[" in growth.holder for growth in report.leaks)
    assert {growth.kind for growth in report.growths} == {"leak"}


def test_reserved_memory_that_grows_alone_is_fragmentation(cuda_driver):
    driver = cuda_driver()
    reserved = iter(range(100, 1000, 100))
    report = find_leaks(lambda: driver.hold(50, next(reserved)))
    assert (report.growths, report.fragmentation_bytes_per_step) == ((), 100)
    assert "Fragmentation" in report.table()
    both = iter(range(100, 1000, 100))
    report = find_leaks(lambda: driver.hold(num_bytes := next(both), num_bytes + 50))
    assert report.fragmentation_bytes_per_step == 0


def test_a_loop_of_ones_own_is_watched_as_long_as_it_takes():
    with LeakFinder(steps=2) as finder:
        kept = []
        for _ in range(6):
            kept.append(torch.zeros(10))
            finder.step_ended()
    assert [growth.bytes_per_step for growth in finder.report.leaks] == [40]
    assert "kept[1]" in finder.report.leaks[0].holder


@pytest.mark.usefixtures("whole_heap")
def test_the_collector_runs_again_once_there_is_a_report():
    """The loop around may have thousands of steps to go, each with garbage in circles."""
    assert gc.isenabled()
    states = []
    with LeakFinder(steps=2) as finder:
        for _ in range(4):
            states.append((gc.isenabled(), gc.get_freeze_count() > 0))
            finder.step_ended()
    assert states == [(False, True)] * 3 + [(True, False)]
    assert (gc.isenabled(), gc.get_freeze_count()) == (True, 0)


def test_a_program_s_own_variables_stay_as_they_are():
    """Before Python 3.13 a frame keeps what it was last asked for, and `locals()` gives the same dictionary."""

    def program():
        settings, kept = 3, [torch.zeros(1)]
        mine = locals()
        return holder_of(kept[0]), mine, settings

    way, mine, settings = program()
    assert "kept" in way
    assert mine["settings"] == settings


def test_looking_keeps_nothing_alive():
    def program():
        held = [torch.zeros(1)]
        yield weakref.ref(held[0])
        del held
        yield None

    running = program()
    gone = next(running)
    way = holder_of(gone())
    assert "`held`[0]" in way
    next(running)
    assert gone() is None


def test_too_few_steps_are_told():
    with pytest.raises(UserError, match="at least two steps"):
        find_leaks(lambda: None, steps=1)
    with LeakFinder() as finder:
        finder.step_ended()
    with pytest.raises(UserError, match="once 4 steps have ended"):
        finder.report  # noqa: B018


class Slotted:
    __slots__ = ("inner",)
    shared = None


def generator(held):
    yield held


@pytest.mark.usefixtures("whole_heap")
def test_holders_are_named_through_what_python_has():
    holder = Slotted()
    holder.inner = {"a": [torch.zeros(1)]}
    Slotted.shared = (torch.zeros(2),)
    running = generator([torch.zeros(3)])
    outside = [running]
    ways = [
        holder_of(holder.inner["a"][0]),
        holder_of(Slotted.shared[0]),
        holder_of(next(running)),
        holder_of(torch.zeros(4)),
    ]
    assert ways[0].startswith("holder.inner['a'][0], local variable of test_holders")
    assert ways[1].endswith("Slotted.shared[0], an attribute of the class")
    assert ways[2].startswith("running `held`, local variable of test_holders")
    assert ways[3] == ""
    assert outside


def test_a_traceback_that_keeps_a_frame_is_named():
    def fails():
        held = torch.zeros(5)
        raise ValueError(held)

    errors = []
    try:
        fails()
    except ValueError as error:
        errors.append(error.with_traceback(error.__traceback__))
        tensor = error.args[0]
        error.args = ()
    way = holder_of([tensor].pop())
    assert way.startswith("tensor, local variable")
    del tensor
    way = holder_of(errors[0].__traceback__.tb_next.tb_frame.f_locals["held"])
    assert "`held` of fails" in way
    assert "traceback" in way
