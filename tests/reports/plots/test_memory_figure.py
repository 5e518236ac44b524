from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import DeviceLimit
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.units import GIB, MIB
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.recipe import load_recipe
from lowmem_ft.reports.plots.memory_figure import memory_figure
from lowmem_ft.reports.plots.memory_moments import moments_of, thinned


@pytest.fixture(scope="module")
def traced():
    """An estimate of a real trace, with micro-batches that were not traced."""
    return estimate_memory(load_recipe("tiny", ["training.gradient_accumulation_steps=5"]), "rtx-4090")


def at_peak(figure):
    return {layer.use: size for layer, size in zip(figure.layers, figure.at_peak_bytes, strict=True)}


def test_the_highest_point_is_the_figure_of_the_estimate(traced):
    figure = memory_figure(traced)
    assert figure.highest_bytes == max(figure.totals_bytes) == traced.process_peak_bytes
    assert figure.process.size_bytes == traced.process_peak_bytes


def test_the_legend_has_the_values_of_the_table(traced):
    figure = memory_figure(traced)
    found = at_peak(figure)
    assert found.pop("context") == traced.process_peak_bytes - traced.reserved_peak_bytes
    assert found.pop("cached") == traced.reserved_peak_bytes - traced.allocated_peak_bytes
    assert found == {use: size for use, size in traced.by_category_at_peak.items() if size}


def test_the_axis_has_the_seconds_of_the_step(traced):
    figure = memory_figure(traced)
    assert figure.axis == "seconds"
    assert figure.end == pytest.approx(traced.step.seconds)
    assert figure.moments[0] == 0
    assert list(figure.moments) == sorted(figure.moments)
    assert figure.moments[-1] <= figure.end
    names = [band.words for band in figure.phases]
    assert names == ["forward", "backward"] * 5 + ["optimizer step"]
    assert figure.phases[0].start == 0
    assert figure.phases[-1].end == figure.end
    assert all(before.end == after.start for before, after in itertools.pairwise(figure.phases))


def test_micro_batches_that_were_not_traced_are_drawn_like_the_last_one(traced):
    figure = memory_figure(traced)
    assert [band.words for band in figure.micro_batches] == ["1", "2", "3", "4", "5"]
    clock = traced.playback.step
    assert clock.untraced == 3
    highest = [
        max(
            total
            for at, total in zip(figure.moments, tensors(figure), strict=True)
            if band.start <= at < band.end
        )
        for band in figure.micro_batches
    ]
    assert highest[1] == highest[2] == highest[3] == highest[4] > highest[0]  # the first has no gradients yet


def tensors(figure):
    kept = [layer.sizes_bytes for layer in figure.layers if layer.use not in ("cached", "context")]
    return [sum(sizes) for sizes in zip(*kept, strict=True)]


def test_parts_outside_the_step_are_there_at_their_highest(traced):
    figure = memory_figure(traced)
    assert [part.words for part in figure.parts] == ["load", "first step", "evaluation"]
    for part in figure.parts:
        of_tensors = part.total_bytes - sum(
            size
            for layer, size in zip(figure.layers, part.sizes_bytes, strict=True)
            if layer.use in ("cached", "context")
        )
        if part.words in traced.by_phase:
            assert of_tensors == traced.by_phase[part.words]


def test_limits_are_the_memory_that_is_free_and_a_budget_below_it(played):
    (limit,) = memory_figure(played).limits
    assert (limit.size_bytes, limit.words) == (2 * GIB, "small-gpu has 2.00 GiB")
    shared = dataclasses.replace(
        played,
        gpu=DeviceLimit(name="small-gpu", memory_bytes=2 * GIB, held_by_others_bytes=GIB // 2),
        budget=dataclasses.replace(played.budget, device_bytes=GIB),
    )
    free, budget = memory_figure(shared).limits
    assert (free.size_bytes, free.words) == (GIB + GIB // 2, "small-gpu has 1.50 GiB free of 2.00 GiB")
    assert (budget.size_bytes, budget.words) == (GIB, "the budget allows 1.00 GiB")


def test_the_cache_is_what_a_smaller_device_leaves_of_it(played):
    tighter = dataclasses.replace(played, reserved_peak_bytes=played.allocated_peak_bytes)
    found = at_peak(memory_figure(tighter))
    assert "cached" not in found or found["cached"] == 0


def test_a_round_that_represents_several_lasts_as_long_as_they_do_at_its_highest(played):
    clock = played.playback.step
    first, last = clock.events
    seconds = np.where(
        clock.positions > first, clock.seconds + 4.0, 0.0
    )  # its first event is seen four seconds late
    late = dataclasses.replace(clock, seconds=seconds, step_seconds=7.0, repeated=((first, last),))
    figure = memory_figure(
        dataclasses.replace(played, playback=dataclasses.replace(played.playback, step=late))
    )
    at_start = [total for at, total in zip(figure.moments, tensors(figure), strict=True) if at == 0]
    assert max(tensors(figure)) == at_start[-1]


def test_a_cpu_takes_what_was_asked_for_and_has_no_clock(estimate):
    on_cpu = dataclasses.replace(
        estimate, gpu=DeviceLimit(name="cpu (x86_64)", memory_bytes=0), allocated_peak_bytes=924 * MIB
    )
    figure = memory_figure(on_cpu)
    assert figure.axis == "events"
    assert "there is no clock" in figure.axis_words
    assert max(tensors(figure)) == max(estimate.timeline.live_bytes())
    assert not figure.limits
    assert {"the process itself", "freed and kept by the heap"} <= {layer.words for layer in figure.layers}


def test_an_estimate_without_a_timeline_is_refused(played):
    with pytest.raises(UserError, match="one without allocations"):
        memory_figure(played.without_timeline())


def test_thinned_moments_keep_the_highest_of_each_stretch_the_end_and_every_phase():
    timeline = Timeline()
    phases = ["forward"] * 50 + ["backward"] + ["optimizer_step"] * 49
    for index, phase in enumerate(phases):
        timeline.free(timeline.malloc(Allocation(size_bytes=1000 - index % 7, phase=phase)))
    moments = list(moments_of(timeline))
    kept = thinned(moments, 4)
    assert len(kept) < 16
    assert kept[-1] is moments[-1]
    assert {one.phase for one in kept} == {"forward", "backward", "optimizer_step"}
    for start in range(0, 200, 50):
        stretch = [one for one in moments if start < one.position <= start + 50]
        assert max(one.total_bytes for one in stretch) in {one.total_bytes for one in kept if one in stretch}


@pytest.mark.parametrize("place", ["host", "pinned", "managed"])
def test_memory_elsewhere_does_not_count(place):
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=1, place=place))
    assert list(moments_of(timeline)) == []
