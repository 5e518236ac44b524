"""Gradients are summed in the same buffers whether anyone watches or not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowmem_ft.foundation.tensors import gradient_sums
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

SIDE = 64
SLACK = 512  # single numbers
Program = Callable[[Tensor], Tensor]


class AddsInPython(torch.autograd.Function):
    """Its backward pass adds two tensors itself: to a new one, as Python asks for."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, *gradients):
        return gradients[0] + gradients[0] * 2


def two_branches(x: Tensor) -> Tensor:
    h = x * 2
    return (h @ x).square().sum() + (h * 3).square().sum()


def residual_stream(x: Tensor) -> Tensor:
    h = x * 2
    for _ in range(3):
        h = h + torch.tanh(h @ x)
    return h.square().sum()


def expanded_first(x: Tensor) -> Tensor:
    """The first gradient to arrive has one element behind it: nothing can be added to it in place."""
    h = x * 2
    return (h @ x).tanh().sum() + h.sum()


def shared_first(x: Tensor) -> Tensor:
    """Both branches hold the gradient that arrives first."""
    h = x * 2
    return torch.tanh(h + h.tanh()).square().sum()


def backward_in_python(x: Tensor) -> Tensor:
    h = x * 2
    return (AddsInPython.apply(h).tanh() + h.tanh()).square().sum()


def three_consumers(x: Tensor) -> Tensor:
    h = x * 2
    return (h * 2 + h * 3 + h * 4).square().sum()


def gathered(x: Tensor) -> Tensor:
    """Its gradient is scattered into zeros, which nothing else holds."""
    return (x * 2).gather(1, torch.zeros(SIDE, 1, dtype=torch.int64)).sum()


def largest(x: Tensor) -> Tensor:
    return (x * 2).max(1).values.sum()


def rows(x: Tensor) -> Tensor:
    return (x * 2)[torch.tensor([0, 1, 5])].sum()


def chosen(x: Tensor) -> Tensor:
    return (x * 2).index_select(0, torch.tensor([0, 1, 5])).sum()


PROGRAMS = [
    *(gathered, largest, rows, chosen),
    two_branches,
    residual_stream,
    expanded_first,
    shared_first,
    three_consumers,
    backward_in_python,
]


def run(program: Program) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        program(torch.rand(SIDE, SIDE, requires_grad=True)).backward()


def unwatched(program: Program) -> list[int]:
    """What torch's allocator gives and gets back, by its own log: no dispatch mode is near."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        run(program)
    assert profiler.profiler is not None
    log: Any = profiler.profiler
    events = log.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return [num_bytes for _, num_bytes in changes]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_trace_allocates_what_an_unwatched_run_allocates(program: Program):
    with TracingMachine() as machine:
        run(program)
    traced = sum(allocation.size_bytes for allocation in machine.recorder.timeline.allocations)
    assert traced == pytest.approx(sum(change for change in unwatched(program) if change > 0), abs=SLACK)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_watched_run_has_the_peak_of_an_unwatched_one(program: Program):
    with StorageTracker() as tracker:
        run(program)
    assert tracker.peak_bytes == pytest.approx(max(itertools.accumulate(unwatched(program))), abs=SLACK)


def test_only_the_engine_writes_in_place():
    """A backward pass in Python that adds two tensors gets a third, as it asks for."""
    with TracingMachine() as machine:
        run(backward_in_python)
    names = [entry.name for entry in machine.work.entries]
    assert ("add" in names, "add_" in names) == (True, True)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_are_differentiated_again_are_not_written_to():
    with TracingMachine() as machine:
        loss = two_branches(torch.rand(SIDE, SIDE, requires_grad=True))
        loss.backward(create_graph=True)
    assert "add_" not in [entry.name for entry in machine.work.entries]


def guess(monkeypatch, answer: bool) -> None:
    """What torch does not document is as if it had changed: each sum without gradients seems the engine's, or none."""
    monkeypatch.setattr(gradient_sums, "_is_held_once", lambda *held: answer)
    monkeypatch.setattr(gradient_sums, "_engine_calls", lambda: answer)


def loss_and_gradient(program: Program, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    with torch.autograd.set_multithreading_enabled(False):
        loss = program(x)
        loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_wrong_guess_changes_no_number(program: Program, answer: bool, monkeypatch: pytest.MonkeyPatch):
    x = torch.rand(SIDE, SIDE)
    expected = loss_and_gradient(program, x)
    guess(monkeypatch, answer)
    with StorageTracker():
        watched = loss_and_gradient(program, x)
    assert all(map(torch.equal, watched, expected))


@pytest.mark.parametrize("answer", [True, False])
def test_a_wrong_guess_changes_no_known_value(answer: bool, monkeypatch: pytest.MonkeyPatch):
    """Whole numbers are computed beside fake tensors, and programs decide by them."""
    guess(monkeypatch, answer)
    with TracingMachine(), torch.no_grad():
        first = torch.tensor([5, 6])
        total = first + torch.tensor([1, 2])
        assert (first.tolist(), total.tolist()) == ([5, 6], [6, 8])


def test_a_wrong_guess_costs_memory(monkeypatch: pytest.MonkeyPatch):
    allocated = []
    for answer in (True, False):
        guess(monkeypatch, answer)
        with TracingMachine() as machine:
            run(residual_stream)
        sizes = [allocation.size_bytes for allocation in machine.recorder.timeline.allocations]
        allocated.append(sum(sizes))
    assert allocated[0] < allocated[1]
