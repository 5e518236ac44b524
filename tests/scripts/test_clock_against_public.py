"""The clock's predictions of public rows: what is kept agrees with the page and with the catalogue's ranges."""

import dataclasses
import math
import statistics

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from clock_against_public import (
    FEWEST_ROWS,
    LEAST_SHARE,
    PAGE,
    Group,
    Host,
    held_share,
    kept_results,
    load_results,
    load_without_publishers,
    needed_share,
    page,
)
from measuring.public_seconds import FEW, MORE, SecondsRow, TracedRow, load_rows, measured_rows, work_of

from lowmem_ft.foundation.catalog.clock_rates import rate_entries
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.foundation.memory.memory_estimate import StepTime
from lowmem_ft.virtual_gpu.calls.work import STEP_END
from lowmem_ft.virtual_gpu.replay.timing.clock import Clock

ROWS = load_rows()
EVERY_ROW = [*ROWS, *measured_rows()]


def test_every_row_says_where_it_is_from_and_runs_on_a_gpu_of_the_catalogue():
    assert len(ROWS) >= 91
    assert len({row.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.url.startswith("https://")
        assert row.seconds > 0
        assert row.program
        assert row.run.gpu == find_gpu(row.gpu).name
        assert row.num_layers > MORE


def test_the_page_shows_what_is_kept():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text


def test_no_row_is_without_a_prediction():
    assert load_results().keys() == {row.name for row in EVERY_ROW}


@pytest.mark.parametrize("gpu", sorted({row.gpu for row in EVERY_ROW if row.is_fitted_to}))
def test_ranges_are_those_of_the_predictions(gpu):
    rates = find_gpu(gpu).rates
    fitted = [row for row in EVERY_ROW if row.gpu == gpu and row.is_fitted_to]
    assert FEWEST_ROWS <= len(fitted) == rates.num_rows
    alike = [row for row in EVERY_ROW if find_gpu(row.gpu).rates == rates]
    assert rates.seconds_share == held_share([kept_results()[row.name]["needed_share"] for row in alike])


def test_most_rows_are_inside_the_range_that_they_had_no_part_in():
    """Each is printed as if its publisher had published nothing: eight of ten are inside, by nobody's choice."""
    ends = load_without_publishers()
    inside = [ends[row.name][0] <= row.seconds <= ends[row.name][2] for row in EVERY_ROW]
    assert sum(inside) / len(inside) >= 0.8
    assert statistics.median(result["half_width"] for result in kept_results().values()) <= 0.25


def test_a_range_is_the_error_that_few_exceed():
    assert held_share([0.5, *(number / 100 for number in range(1, 40))]) == 0.35
    assert held_share([0.2, 0.3, 0.1]) == 0.3
    assert held_share([0.01]) == LEAST_SHARE


class MadeUp(TracedRow):
    """A row whose seconds follow from two numbers exactly, on a GPU that reaches less than its microbenchmarks."""

    def __init__(self, flops, num_bytes, url=""):
        self.flops, self.num_bytes, self._gpu = flops, num_bytes, find_gpu("a100-80gb")
        measured = dataclasses.replace(self.gpu.rates, products=0.7, bandwidth=0.8)
        seconds = self.seconds(dataclasses.replace(self.gpu, rates=measured))
        self.row = SecondsRow(
            name=f"made up {flops}",
            url=url,
            date="",
            gpu="a100-80gb",
            program="",
            settings={},
            seconds=seconds,
        )

    def seconds(self, gpu=None):
        gpu = gpu or self.gpu
        return self.flops / gpu.rates.products + self.num_bytes / gpu.rates.bandwidth

    def step(self, gpu):
        return StepTime(
            seconds=self.seconds(gpu),
            tokens=0,
            bound_by="compute",
            seconds_share=gpu.rates.seconds_share,
            by_kind={"products": 1.0},
        )


def test_a_fit_finds_the_numbers_that_made_its_rows_and_keeps_no_others():
    rows = [MadeUp(flops, 10 - flops) for flops in range(11)] * 6
    numbers, predictions = Group({"compute_capability": "8.0"}, rows).fitted()
    assert numbers == {"products": pytest.approx(0.7, rel=0.02), "bandwidth": pytest.approx(0.8, rel=0.02)}
    assert predictions == [pytest.approx(row.row.seconds, rel=0.02) for row in rows]


def test_a_source_that_is_off_is_outside_by_what_the_others_say():
    """Its own rows, which are half of all, do not vouch for it."""
    rows = [
        MadeUp(flops, 10 - flops, url=f"https://host/a/{who}")
        for flops in range(11)
        for who in ("one", "two")
    ]
    for row in rows[::2]:
        row.row = dataclasses.replace(row.row, name=f"off {row.row.name}", seconds=1.5 * row.row.seconds)
    needed = Group({"compute_capability": "8.0"}, rows).needed_shares(Host.of(rate_entries()))
    assert needed["off made up 5"] == pytest.approx(0.5, rel=0.06)
    assert needed["made up 5"] == pytest.approx(0.5, rel=0.3)  # the others are drawn towards microbenchmarks


@pytest.mark.parametrize("seconds", [7.0, 14.0])
def test_the_share_that_a_row_needs_puts_it_at_the_end_of_its_range(seconds):
    step = StepTime(
        seconds=10.0, tokens=1, bound_by="compute", host_share=0.3, host_range=(0.4, 1.4), seconds_share=0.05
    )
    needed = needed_share(step, seconds)
    both = math.expm1(math.hypot(math.log1p(needed), math.log1p(0.05)))
    with_it = dataclasses.replace(step, seconds_share=both)
    end = with_it.low_seconds if seconds < 10 else with_it.high_seconds
    assert end == pytest.approx(seconds)
    assert needed_share(step, 10.1) == 0.0  # the host explains it


def test_a_row_that_is_off_does_not_predict_itself():
    rows = [MadeUp(5, 5) for _ in range(5)]
    rows[0].row = dataclasses.replace(rows[0].row, seconds=2 * rows[0].row.seconds)
    _, predictions = Group({"compute_capability": "8.0"}, rows).fitted()
    assert predictions[0] == pytest.approx(rows[1].row.seconds, rel=0.04)  # drawn towards microbenchmarks
    assert predictions[1] > predictions[0]


@pytest.mark.parametrize("change", [{"same_kernels": False}, {"held_out": True}])
def test_rows_of_other_kernels_and_those_held_out_are_predicted_and_not_fitted_to(change):
    rows = [MadeUp(flops, 10 - flops) for flops in range(11)] * 6
    other = MadeUp(5, 5)
    other.row = dataclasses.replace(other.row, seconds=9 * other.row.seconds, **change)
    numbers, predictions = Group({"compute_capability": "8.0"}, [other, *rows]).fitted()
    assert numbers["products"] == pytest.approx(0.7, rel=0.02)
    assert predictions[-1] == pytest.approx(other.row.seconds / 9, rel=0.02)


@pytest.mark.parametrize(
    "quantization,length,tolerance",
    [pytest.param("none", 4096, 0.01, marks=pytest.mark.slow), ("nf4", 512, 0.12)],
)
def test_seconds_grow_by_a_layer_at_a_time(quantization, length, tolerance):
    """Less so where calls of bitsandbytes' functions keep the host: few layers hide behind the head's kernels."""
    row = next(
        row
        for row in ROWS
        if (row.settings["model"], row.settings["length"]) == ("smollm2-135m", length)
        and row.settings.get("quantization") == quantization
    )
    gpu = find_gpu(row.gpu)
    few, more, many = (last_step(work_of(row.run, layers), gpu) for layers in (FEW, MORE, 7))
    assert many == pytest.approx(few + (7 - FEW) / (MORE - FEW) * (more - few), rel=tolerance)
    assert not math.isclose(few, more)


def last_step(work, gpu):
    first, last = (index for index, entry in enumerate(work) if entry.name == STEP_END)
    return Clock(work).times_on(gpu).between(first, last).seconds
