from __future__ import annotations

import dataclasses

import pytest
from drawings import check_readable, elements, words

from lowmem_ft.foundation.units import GIB
from lowmem_ft.reports.plots.figure import Limit, Line, LineFigure
from lowmem_ft.reports.plots.line_svg import line_svg
from lowmem_ft.reports.plots.run_figures import run_figures
from lowmem_ft.reports.plots.svg import tick_words

LOSSES = LineFigure(
    title="Loss",
    axis_words="step",
    unit="number",
    lines=[
        Line(words="training", points=[(step, 3 - step / 100) for step in range(1, 201)]),
        Line(words="held-out", points=[(100, 2.5), (200, 1.5)], shows_points=True),
        Line(words="held-out, a source with a long name", points=[(100, 2.6), (200, 1.6)], shows_points=True),
    ],
)


@pytest.mark.parametrize("width", [390, 960])
@pytest.mark.parametrize(
    "points", [[(1, 0.0)], [(1, 5.0), (2, 5.0)], [(1, 1e-9), (3, 2e-9)], [(1, 12345.0), (2, 99999.0)]]
)
def test_every_text_is_readable_whatever_the_numbers(points, width):
    figure = dataclasses.replace(LOSSES, lines=[Line(words="training", points=points)])
    check_readable(line_svg(figure, width), width)
    check_readable(line_svg(LOSSES, width), width)


def test_lines_go_through_their_points():
    svg = line_svg(LOSSES)
    training, held_out, _ = [
        [tuple(map(float, pair.split(","))) for pair in one.get("points").split()]
        for one in elements(svg, "polyline")
    ]
    assert len(training) == 200
    (x, y), (last_x, last_y) = held_out
    assert x == pytest.approx(training[99][0], abs=0.11)
    assert last_x == training[-1][0]
    rise = (training[0][1] - training[-1][1]) / (LOSSES.lines[0].points[0][1] - 1.0)
    assert (y - last_y) / rise == pytest.approx(1.0, abs=0.01)
    assert len(elements(svg, "circle")) == 4


@pytest.mark.parametrize(
    "values, shown",
    [
        ([0.0, 0.005, 0.01], ["0.000", "0.005", "0.010"]),
        ([2.5, 2.55], ["2.50", "2.55"]),
        ([0, 2000], ["0", "2,000"]),
        ([0.15, 0.3], ["0.15", "0.30"]),
    ],
)
def test_neighbours_on_an_axis_have_different_words(values, shown):
    assert tick_words(values) == shown


def test_a_long_run_keeps_its_highest_and_its_lowest_point():
    points = [(step, float(step == 70_001) - (step == 30_001)) for step in range(100_000)]
    svg = line_svg(dataclasses.replace(LOSSES, lines=[Line(words="training", points=points)]))
    (drawn,) = elements(svg, "polyline")
    heights = [float(pair.split(",")[1]) for pair in drawn.get("points").split()]
    assert len(heights) < 1300
    assert len(set(heights)) == 3


def test_sizes_begin_at_zero_and_show_their_limit():
    figure = LineFigure(
        title="Memory",
        axis_words="step",
        unit="bytes",
        lines=[Line(words="peak", points=[(1, 20 * GIB), (2, 21 * GIB)])],
        limits=[Limit(words="small-gpu has 24.0 GiB", size_bytes=24 * GIB)],
    )
    svg = line_svg(figure)
    check_readable(svg, 420)
    shown = [one.text for one in words(svg)]
    assert {"0", "20 GiB", "small-gpu has 24.0 GiB"} <= {*shown}
    beyond = dataclasses.replace(figure, limits=[Limit(words="a lot", size_bytes=100 * GIB)])
    assert "↑ a lot" in [one.text for one in words(line_svg(beyond))]


def test_a_run_has_the_lines_that_its_metrics_have_numbers_for():
    metrics = [
        {"step": 1, "loss": 2.0, "memory_peak_bytes": 5, "memory_now_bytes": 4, "tokens_per_second": 9.0},
        {"step": 2, "loss": float("nan"), "tokens_per_second": 8.0},
        {"step": 2, "eval_loss": 1.5, "eval_loss_chats": 1.25},
        {"step": 2, "measured": {}},
    ]
    losses, memory, speed = run_figures(metrics)
    assert {line.words: line.points for line in losses.lines} == {
        "training": [(1, 2.0)],
        "held-out": [(2, 1.5)],
        "held-out, chats": [(2, 1.25)],
    }
    assert {line.words: line.points for line in memory.lines} == {
        "peak": [(1, 5)],
        "after the step": [(1, 4)],
    }
    assert [line.points for line in speed.lines] == [[(1, 9.0), (2, 8.0)]]
    assert run_figures([]) == []
