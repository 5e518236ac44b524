"""A trace does a few rounds of a loop, and knows of all work, whenever it is done, which round it belongs to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
import torch

from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.foundation.repetition import rounds
from lowmem_ft.virtual_gpu.calls.skipped_rounds import AlikeRounds
from lowmem_ft.virtual_gpu.calls.work import Work, WorkLog
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


@dataclass(eq=False)
class Item:
    name: str


@pytest.fixture
def work():
    return WorkLog(Timeline())


@pytest.fixture
def alike(work):
    return AlikeRounds(work)


def moments(work):
    """What is logged: rounds as brackets behind their counts, kernels by name."""
    written = {"round begin": "({}", "round end": ")"}
    return " ".join(written.get(entry.name, entry.name).format(entry.times) for entry in work.entries)


@pytest.mark.parametrize(
    "items, expected",
    [
        ("", []),
        ("abc", [("a", 1), ("b", 1), ("c", 1)]),
        ("abcd", [("a", 1), ("b", 2), ("d", 1)]),
        ("abcdefghij", [("a", 1), ("b", 8), ("j", 1)]),
    ],
)
def test_the_second_round_counts_for_all_like_it(alike, items, expected):
    assert [(item, alike.times) for item in alike.rounds(items)] == expected
    assert sum(times for _, times in expected) == len(items)
    assert alike.times == 1


def test_a_loop_in_a_round_counts_for_each_of_its_rounds(alike):
    counts = [alike.times for _ in alike.rounds(range(5)) for _ in alike.rounds(range(6))]
    assert counts == [1, 4, 1, 3, 12, 3, 1, 4, 1]


def test_a_loop_that_is_left_early_leaves_no_count(alike):
    for item in alike.rounds(range(9)):
        if item == 1:
            assert alike.times == 7
            break
    assert alike.times == 1


def ahead(few, work):
    """Fetches each item while the second one before it is worked on."""
    read = deque()
    for item in few:
        work.add(Work("kernel", 0, name=f"fetch-{item.name}"))
        read.append(item)
        if len(read) == 2:
            yield read.popleft()
    yield from read


def test_items_that_come_again_count_as_before_even_where_they_are_read_ahead(alike, work):
    items = [Item(name) for name in "abcdefghi"]
    visits = ahead(alike.rounds(items), work)
    assert [(item.name, alike.times) for item in alike.rounds(visits)] == [
        *(("a", 1), ("b", 1), ("c", 4), ("g", 1), ("h", 1), ("i", 1))
    ]
    assert [item.name for item in alike.rounds(iter(items))] == list("abcdefghi")


def test_a_round_is_whole_with_what_it_does_for_a_later_item(alike, work):
    """Else all fetches of the alike items would come first, and none beside the work on another."""
    for item in alike.rounds(ahead(alike.rounds([Item(name) for name in "abcdefghi"]), work)):
        work.add(Work("kernel", 0, name=item.name))
    assert moments(work) == (
        "fetch-a fetch-b (1 a fetch-c ) (1 b fetch-g ) (4 c fetch-h ) (1 g fetch-i ) (1 h ) (1 i )"
    )


def test_backward_counts_as_forward_did():
    def counts(name, program):
        with VirtualGPU("t4") as gpu:
            x = torch.ones(4, device="cuda", requires_grad=True)
            program(x)
        return [work.times for work in gpu.work.entries if work.name == name]

    def sum_of_sines(x):
        outputs = [x.sin() for _ in rounds(range(6))]
        torch.stack(outputs).sum().backward()

    def twice(x):
        sum_of_sines(x)
        x.sin().sum().backward()

    assert counts("sin", sum_of_sines) == [1, 4, 1]
    assert counts("cos", sum_of_sines) == [1, 4, 1]  # the gradient of a sine
    assert counts("cos", twice) == [1, 4, 1, 1]


def test_what_backward_computes_anew_counts_in_its_own_backward():
    """As a tiled MLP does: its backward runs forward again, and backward through that."""

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.sin()

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                y = x.tan().sin()
            y.backward(gradient)
            return x.grad

    with VirtualGPU("t4") as gpu:
        x = torch.ones(4, device="cuda", requires_grad=True)
        torch.stack([Again.apply(x) for _ in rounds(range(6))]).sum().backward()
    for name in ("tan", "cos"):
        assert [work.times for work in gpu.work.entries if work.name == name] == [1, 4, 1]
