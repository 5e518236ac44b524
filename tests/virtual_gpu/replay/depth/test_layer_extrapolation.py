"""Cutting a trace into sweeps and repeating a layer's part, on timelines made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from lowmem_ft.foundation.memory.category import Phase
from lowmem_ft.foundation.memory.memory_estimate import ModelSize
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import Work, WorkLog
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import Layers, NotRegularError
from lowmem_ft.virtual_gpu.replay.depth.repetition_proof import extend

EVERY_LAYER_ALIKE = Layers(stack="model.layers", lead=0, period=1)

Size = Callable[[int], int]


class Program:
    """A forward and a backward pass over layers, then a step: what is allocated, in order.

    Args:
        num_layers: of the model.
        activation: bytes that a layer keeps until its backward pass.
    """

    def __init__(self, num_layers: int, activation: Size = lambda layer: 100) -> None:
        self.num_layers = num_layers
        self.timeline = Timeline()
        self.log = WorkLog(self.timeline)
        self.weights = [self.take(1000, layer) for layer in range(num_layers)]
        self.embedded = self.take(70)
        self.kept = self.forward(activation)
        logits = self.take(500, phase="forward")
        self.gradients = self.backward()
        self.timeline.free(logits)
        self.step()

    def forward(self, activation: Size) -> list[int]:
        kept = []
        for layer in range(self.num_layers):
            temporary = self.take(7, layer, "forward")
            kept.append(self.take(activation(layer), layer, "forward"))
            self.timeline.free(temporary)
        return kept

    def backward(self) -> list[int]:
        gradients = []
        for layer in reversed(range(self.num_layers)):
            gradients.append(self.take(1000, layer, "backward"))
            self.timeline.free(self.kept[layer])
        return gradients

    def step(self) -> None:
        norms = self.take(4 * self.num_layers, phase="optimizer_step")
        for gradient in self.gradients:
            self.timeline.free(gradient)
        self.timeline.free(norms)

    def take(self, size_bytes: int, layer: int | None = None, phase: Phase = "load") -> int:
        module = "model.embed" if layer is None else f"model.layers.{layer}.mlp"
        index = self.timeline.malloc(Allocation(size_bytes=size_bytes, module=module, phase=phase))
        self.log.entries.append(Work("kernel", self.log.position, name=phase, num_bytes=size_bytes))
        return index

    def trace(self) -> Trace:
        size = ModelSize(
            name="", parameters=10 + 5 * self.num_layers, trainable_parameters=2 * self.num_layers
        )
        return Trace(timeline=self.timeline, work=self.log.entries, model=size)


def extended(
    make: Callable[[int], Program], num_layers: int, *, short: int = 3, layers: Layers = EVERY_LAYER_ALIKE
) -> Trace:
    more, rest = divmod(num_layers - short, layers.period)
    assert not rest
    return extend(make(short).trace(), make(short + layers.period).trace(), layers, [more])


def events(trace: Trace) -> list[tuple[str, int, str, str]]:
    """What happens, by content; frees between two births in order of birth, as ``extend`` has them."""
    result, frees = [], []
    for kind, index in trace.timeline.events:
        allocation = trace.timeline.allocations[index]
        entry = (kind, allocation.size_bytes, allocation.module, allocation.phase)
        if kind == "free":
            frees.append((index, entry))
            continue
        result += [free for _, free in sorted(frees)] + [entry]
        frees = []
    return result + [free for _, free in sorted(frees)]


def work(trace: Trace) -> list[tuple[str, int]]:
    return [(entry.name, entry.num_bytes) for entry in trace.work]


def assert_equal(mine: Trace, theirs: Trace) -> None:
    assert events(mine) == events(theirs)
    assert list(mine.timeline.live_bytes())[-1] == list(theirs.timeline.live_bytes())[-1]
    assert max(mine.timeline.live_bytes()) == max(theirs.timeline.live_bytes())
    assert work(mine) == work(theirs)
    assert mine.model == theirs.model


def test_three_equal_layers_make_a_hundred() -> None:
    assert_equal(extended(Program, 100), Program(100).trace())


def test_work_stays_behind_the_allocation_that_it_followed() -> None:
    def births_before(trace: Trace) -> list[int]:
        kinds = [kind for kind, _ in trace.timeline.events]
        return [kinds[: entry.position].count("malloc") for entry in trace.work]

    assert births_before(extended(Program, 9)) == births_before(Program(9).trace())


def test_what_alternates_is_repeated_in_pairs() -> None:
    def alternating(num_layers: int) -> Program:
        return Program(num_layers, lambda layer: 100 if layer % 2 else 300)

    layers = Layers(stack="model.layers", lead=0, period=2)
    assert_equal(extended(alternating, 20, short=6, layers=layers), alternating(20).trace())
    with pytest.raises(NotRegularError):
        extended(alternating, 20)


def test_layers_in_front_that_differ_are_left_alone() -> None:
    def dense_first(num_layers: int) -> Program:
        return Program(num_layers, lambda layer: 900 if layer == 0 else 100)

    layers = Layers(stack="model.layers", lead=1, period=1)
    assert_equal(extended(dense_first, 12, short=4, layers=layers), dense_first(12).trace())


def test_the_last_layer_may_differ() -> None:
    def last_is_large(num_layers: int) -> Program:
        return Program(num_layers, lambda layer: 900 if layer == num_layers - 1 else 100)

    assert_equal(extended(last_is_large, 12), last_is_large(12).trace())


class ReadTwiceOver(Program):
    """What a layer hands on is read by the next layer and the one after it."""

    def forward(self, activation: Size) -> list[int]:
        kept, handed_on = [], [self.embedded, self.embedded]
        for layer in range(self.num_layers):
            kept.append(self.take(activation(layer), layer, "forward"))
            if layer > 1:
                self.timeline.free(handed_on[-2])
            handed_on.append(self.take(33, layer, "forward"))
        return kept


def test_what_lives_for_two_layers_needs_a_margin_of_two() -> None:
    wide = Layers(stack="model.layers", lead=1, period=1)
    assert_equal(extended(ReadTwiceOver, 12, short=5, layers=wide), ReadTwiceOver(12).trace())


class NormsUntilTheLastLayer(Program):
    """A norm for each gradient; all of them go when the pass after reaches the last layer, as in clipping."""

    def step(self) -> None:
        layers = range(self.num_layers)
        norms = [self.take(4, layer, "optimizer_step") for layer in layers]
        for layer in layers:
            self.take(8, layer, "optimizer_step")
            if layer == layers[-1]:
                for norm in norms:
                    self.timeline.free(norm)
            self.take(9, layer, "optimizer_step")
        super().step()


def test_what_lives_until_the_last_layer_does_so_in_a_deeper_model() -> None:
    assert_equal(extended(NormsUntilTheLastLayer, 12, short=4), NormsUntilTheLastLayer(12).trace())


@pytest.mark.parametrize(
    "activation",
    [
        pytest.param(lambda num_layers: lambda layer: 100 + layer, id="each-layer-larger"),
        pytest.param(
            lambda num_layers: lambda layer: 100 + num_layers, id="all-layers-larger-in-deeper-models"
        ),
        pytest.param(
            lambda num_layers: lambda layer: 100 if layer < num_layers // 2 else 900, id="halves-differ"
        ),
    ],
)
def test_layers_that_do_not_repeat_are_refused(activation: Callable[[int], Size]) -> None:
    with pytest.raises(NotRegularError):
        extended(lambda num_layers: Program(num_layers, activation(num_layers)), 9)


TWO_STRETCHES = Layers(stack="model.layers", lead=0, period=1, tails=(4,))


def with_last(base: type[Program], num_others: int, num_last: int) -> Program:
    """The last layers keep more than the others."""
    return base(num_others + num_last, lambda layer: 100 if layer < num_others else 900)


@pytest.mark.parametrize("program", [Program, ReadTwiceOver, NormsUntilTheLastLayer])
@pytest.mark.parametrize("more", [(9, 5), (0, 7), (6, 0)])
def test_last_layers_of_another_kind_repeat_by_themselves(
    program: type[Program], more: tuple[int, int]
) -> None:
    layers = (
        Layers(stack="model.layers", lead=1, period=1, tails=(5,))
        if program is ReadTwiceOver
        else TWO_STRETCHES
    )
    (tail,) = layers.tails
    short, longer = with_last(program, tail, 4), with_last(program, tail + 1, 5)
    mine = extend(short.trace(), longer.trace(), layers, more)
    assert_equal(mine, with_last(program, tail + more[0], 4 + more[1]).trace())


def test_growth_that_two_stretches_cannot_share_is_refused() -> None:
    class Odd(Program):
        def step(self) -> None:
            super().step()
            self.timeline.free(self.take(10 + 3 * self.num_layers // 2))

    with pytest.raises(NotRegularError, match="differently"):
        extend(with_last(Odd, 4, 4).trace(), with_last(Odd, 5, 5).trace(), TWO_STRETCHES, (1, 1))


def test_memory_in_whole_pages_grows_by_what_was_asked_for() -> None:
    class InPages(Program):
        def step(self) -> None:
            super().step()
            asked = 1000 * self.num_layers
            index = self.take(-(-asked // 4096) * 4096)
            self.timeline.allocations[index].asked_bytes = asked

    assert events(extended(InPages, 12)) == events(InPages(12).trace())


class BackwardInOrder(Program):
    """The backward pass takes the layers from the first to the last in a shallow model, and back in a deeper one."""

    def backward(self) -> list[int]:
        order: Iterable[int] = range(self.num_layers)
        gradients = []
        for layer in order if self.num_layers == 3 else reversed(range(self.num_layers)):
            gradients.append(self.take(1000, layer, "backward"))
            self.timeline.free(self.kept[layer])
        return gradients


def test_another_order_of_layers_is_refused() -> None:
    with pytest.raises(NotRegularError):
        extended(BackwardInOrder, 9)


def test_traces_that_are_not_a_period_apart_are_refused() -> None:
    with pytest.raises(NotRegularError, match="one period apart"):
        extend(Program(3).trace(), Program(5).trace(), EVERY_LAYER_ALIKE, [6])


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(NotRegularError, match="too few"):
        extended(Program, 9, short=2)


def test_an_emptied_cache_is_refused() -> None:
    class Emptying(Program):
        def step(self) -> None:
            self.timeline.empty_cache()
            super().step()

    with pytest.raises(NotRegularError, match="cache"):
        extended(Emptying, 9)
