"""Proofs that hold for another program of the same model: one that differs outside the layers alone."""

from __future__ import annotations

import pytest

from lowmem_ft.foundation.memory.category import Phase
from lowmem_ft.foundation.memory.memory_estimate import ModelSize
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import BETWEEN_STEPS, Work, WorkLog
from lowmem_ft.virtual_gpu.replay.depth.inherited_proof import Outline, inherit, outline_of
from lowmem_ft.virtual_gpu.replay.depth.layer_extrapolation import Repetition
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import Layers
from lowmem_ft.virtual_gpu.replay.depth.repetition_proof import prove

LAYERS = Layers(stack="model.layers", lead=0, period=1)
SHORT, DEEP = 4, 12


def program(
    num_layers: int,
    *,
    waiting: int = 1,
    chunks: int = 2,
    updates: int = 1,
    lists_in_head: int = 0,
    kept: int = 1,
    norms_by_chunk: int = 0,
    token_bytes: int = 10,
) -> Trace:
    """Make the trace of a step: batches, a forward pass, chunks of the loss, a backward pass, norms, updates."""
    timeline = Timeline()
    log = WorkLog(timeline)

    def take(size: int, module: str = "", phase: Phase = "load", *names: str) -> int:
        index = timeline.malloc(
            Allocation(size_bytes=size, category="temporary", phase=phase, module=module, stream=0)
        )
        for name in names:
            log.add(Work("kernel", len(timeline.events), name=name, num_bytes=size))
        return index

    layers = [f"model.layers.{layer}" for layer in range(num_layers)]
    for layer in layers:
        take(1000, layer)
    take(70, "model.embed_tokens")
    log.mark(BETWEEN_STEPS)
    batches = [take(token_bytes) for _ in range(waiting)]
    activations = [[take(token_bytes * 10, layer, "forward", "mm") for _ in range(kept)] for layer in layers]
    for _ in range(chunks):
        timeline.free(take(token_bytes * 50, "lm_head", "forward", "mm"))
    for _ in range(lists_in_head):
        timeline.free(take(8, "lm_head", "forward", "_foreach_norm"))
    if norms_by_chunk:
        timeline.free(take(4 * num_layers, "lm_head", "forward"))
    gradients = []
    for layer, own in zip(reversed(layers), reversed(activations), strict=True):
        gradients.append(take(1000, layer, "backward", "mm"))
        for activation in own:
            timeline.free(activation)
    norms = take(4 * num_layers, "", "optimizer_step", "stack")
    updated = [take(30, "", "optimizer_step", "update") for _ in range(updates)]
    for index in sorted((*gradients, norms, *batches, *updated)):
        timeline.free(index)
    size = ModelSize(name="", parameters=1000 * num_layers, trainable_parameters=1000 * num_layers)
    return Trace(timeline=timeline, work=log.entries, model=size)


def inherited(short: Trace, **of_proved: int) -> Repetition | None:
    proved = program(SHORT, **of_proved)
    shown = prove(proved, program(SHORT + 1, **of_proved), LAYERS)
    return inherit(shown, Outline.of(proved, LAYERS), outline_of(short, LAYERS), short)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"token_bytes": 30},
        {"chunks": 5},
        {"chunks": 1},
        {"waiting": 6},
        {"waiting": 4, "chunks": 1, "token_bytes": 20},
    ],
    ids=str,
)
def test_what_a_batch_or_the_head_does_more_often_is_no_matter_of_depth(other: dict[str, int]) -> None:
    short = program(SHORT, **other)
    repetition = inherited(short, waiting=2)
    assert repetition is not None
    mine, deep = repetition.extend(short, (DEEP - SHORT,)), program(DEEP, **other)
    assert mine.timeline.allocations == deep.timeline.allocations
    # Work that follows a birth comes after the deaths that follow it, too.
    assert [entry.at(0) for entry in mine.work] == [entry.at(0) for entry in deep.work]
    assert mine.timeline.events == deep.timeline.events
    assert mine.model == deep.model
    own = prove(short, program(SHORT + 1, **other), LAYERS)
    assert (repetition.structure, repetition.sizes, repetition.work) == (own.structure, own.sizes, own.work)


@pytest.mark.parametrize(
    "other",
    [{"kept": 2}, {"updates": 2}, {"lists_in_head": 1}],
    ids=["in-the-layers", "in-the-optimizer's-step", "lists-of-tensors"],
)
def test_what_may_depend_on_the_depth_is_proved_again(other: dict[str, int]) -> None:
    assert inherited(program(SHORT, **other)) is None


def test_what_grows_must_be_met_unchanged() -> None:
    assert inherited(program(SHORT, norms_by_chunk=1), norms_by_chunk=1) is not None
    assert inherited(program(SHORT), norms_by_chunk=1) is None


def test_another_number_of_layers_or_passes_is_proved_again() -> None:
    assert inherited(program(SHORT + 1)) is None
    assert inherited(program(2)) is None
