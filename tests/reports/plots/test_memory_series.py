from __future__ import annotations

import itertools
import random

import pytest

from lowmem_ft.foundation.units import MIB
from lowmem_ft.memory.analysis import peak_by_phase
from lowmem_ft.memory.timeline import Allocation, Timeline
from lowmem_ft.reports.plots.memory_series import STACKED, phase_bands, sample_memory


def random_timeline(num_allocations: int) -> Timeline:
    chance = random.Random(0)
    timeline, live = Timeline(), []
    for index in range(num_allocations):
        phase = ("load", "forward", "backward", "optimizer_step")[4 * index // num_allocations]
        live.append(
            timeline.malloc(
                Allocation(size_bytes=chance.randrange(1, 1000), category=chance.choice(STACKED), phase=phase)
            )
        )
        while live and chance.random() < 0.45:
            timeline.free(live.pop(chance.randrange(len(live))))
    return timeline


def test_every_moment_is_what_the_timeline_holds_there():
    timeline = random_timeline(2000)
    live_bytes = list(timeline.live_bytes())
    samples = sample_memory(timeline, max_moments=50)
    assert 50 <= len(samples) <= 54
    for sample in samples:
        assert sample.total_bytes == sum(sample.stacked_bytes) == live_bytes[sample.position]
    positions = [sample.position for sample in samples]
    assert positions == sorted(set(positions))


def test_the_highest_moment_of_every_stretch_is_kept():
    timeline = random_timeline(2000)
    live_bytes = list(timeline.live_bytes())
    kept = [sample.total_bytes for sample in sample_memory(timeline, max_moments=20)]
    for stretch in range(20):
        at = [position for position in range(len(live_bytes)) if position * 20 // len(live_bytes) == stretch]
        assert max(live_bytes[position] for position in at) in kept


def test_the_highest_moment_of_every_phase_is_kept_however_short():
    timeline = random_timeline(500)
    brief = timeline.malloc(Allocation(size_bytes=1, phase="save"))
    timeline.free(brief)
    timeline.malloc(Allocation(size_bytes=10**6, phase="forward"))
    live_bytes = list(timeline.live_bytes())
    kept = {}
    for sample in sample_memory(timeline, max_moments=2):
        kept[sample.phase] = max(sample.total_bytes, kept.get(sample.phase, 0))
    assert kept == peak_by_phase(timeline, live_bytes)


def test_bytes_count_in_the_category_they_are_for(timeline):
    peak = max(sample_memory(timeline), key=lambda sample: sample.total_bytes)
    assert dict(zip(STACKED, peak.stacked_bytes, strict=True)) == {
        "parameter": 200 * MIB,
        "optimizer_state": 400 * MIB,
        "gradient": 200 * MIB,
        "communication": 0,
        "workspace": 0,
        "input": 0,
        "activation": 60 * MIB + 200,
        "logits_and_loss": 0,
        "temporary": 64 * MIB,
    }
    assert (peak.phase, peak.module) == ("backward", "model.layers.1.mlp")


def test_an_allocators_sizes_count_if_they_are_given(timeline):
    sizes = [2 * allocation.size_bytes for allocation in timeline.allocations]
    plain, doubled = (sample_memory(timeline, sizes_bytes=given) for given in (None, sizes))
    assert [2 * sample.total_bytes for sample in plain] == [sample.total_bytes for sample in doubled]


def test_bands_cover_everything_without_a_gap(timeline):
    samples = sample_memory(timeline)
    bands = phase_bands(samples, end=100)
    assert [phase for phase, _, _ in bands] == [
        "load", "forward", "backward", "optimizer_step", "forward", "backward"
    ]  # fmt: skip
    assert bands[0][1] == 0
    assert bands[-1][2] == 100
    assert all(before[2] == after[1] for before, after in itertools.pairwise(bands))


@pytest.mark.parametrize("place", ["host", "pinned", "managed"])
def test_memory_elsewhere_does_not_count(place):
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=1, place=place))
    assert sample_memory(timeline) == []
