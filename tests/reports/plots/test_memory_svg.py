from __future__ import annotations

import dataclasses

import pytest
from drawings import check_readable, elements, words

from lowmem_ft.foundation.memory.memory_estimate import DeviceLimit
from lowmem_ft.foundation.units import GIB, MIB, format_bytes
from lowmem_ft.reports.plots.figure import Band, Limit
from lowmem_ft.reports.plots.memory_figure import memory_figure
from lowmem_ft.reports.plots.memory_svg import memory_svg


@pytest.fixture
def figure(played):
    return memory_figure(played)


def texts(svg):
    return [one.text for one in words(svg)]


@pytest.mark.parametrize("width", [390, 420, 960])
@pytest.mark.parametrize("limit_bytes", [GIB, 1237 * MIB, 1300 * MIB, 2 * GIB, 80 * GIB])
def test_every_text_is_readable_wherever_the_limit_is(played, limit_bytes, width):
    device = DeviceLimit(name="rtx-pro-6000-blackwell-max-q", memory_bytes=limit_bytes)
    name = "some-organisation/a-model-with-a-long-name-27B-Instruct-2512-base"
    model = dataclasses.replace(played.model, name=name)
    svg = memory_svg(memory_figure(dataclasses.replace(played, gpu=device, model=model)), width)
    check_readable(svg, width)


def test_a_run_with_many_micro_batches_is_readable(figure):
    number = 64
    batches = [
        Band(words=f"{index + 1}", start=index * figure.end / number, end=(index + 1) * figure.end / number)
        for index in range(number)
    ]
    svg = memory_svg(dataclasses.replace(figure, micro_batches=batches))
    check_readable(svg, 420)
    assert "64 micro-batches" in texts(svg)
    assert "63" not in texts(svg)


def test_the_limit_is_drawn_where_it_is(figure):
    svg = memory_svg(figure)
    assert "small-gpu has 2.00 GiB" in texts(svg)
    limits = [one for one in elements(svg, "line") if one.get("class") == "limit"]
    (y,) = {float(one.get("y1")) for one in limits if one.get("y1") == one.get("y2")}
    (process,) = {float(one.get("y1")) for one in elements(svg, "line") if one.get("class") == "edge"}
    bottom = next(float(one.get("y2")) for one in elements(svg, "line") if one.get("class") == "peak")
    limit = figure.limits[0].size_bytes
    assert (bottom - y) / (bottom - process) == pytest.approx(limit / figure.process.size_bytes, rel=0.01)


def test_a_limit_far_above_is_named_and_does_not_flatten_the_rest(figure):
    far = dataclasses.replace(figure, limits=[Limit(words="h200 has 140 GiB", size_bytes=140 * GIB)])
    svg = memory_svg(far)
    assert "↑ h200 has 140 GiB" in texts(svg)
    assert not [one for one in elements(svg, "line") if one.get("class") == "limit"]


def test_the_stack_reaches_the_line_of_the_process(figure):
    svg = memory_svg(figure)
    (process,) = [float(one.get("y1")) for one in elements(svg, "line") if one.get("class") == "edge"]
    whole = elements(svg, "path")[0].get("d")
    heights = [float(part.split("H")[0].rstrip("Z")) for part in whole.split("V")[1:]]
    assert min(heights) == pytest.approx(process, abs=0.11)


def test_the_legend_has_values_that_sum_to_the_whole(figure):
    shown = texts(memory_svg(figure))
    assert shown[shown.index("parameters") + 1] == "200 MiB"
    assert shown[shown.index("optimizer state") + 1] == "400 MiB"
    assert shown[shown.index("all of it") + 1] == format_bytes(figure.process.size_bytes)
    assert sum(figure.at_peak_bytes) == figure.process.size_bytes


def test_phases_are_named_with_their_seconds(figure):
    shown = texts(memory_svg(figure, 960))
    assert {"forward", "backward"} <= {*shown}
    lengths = {band.words: band.end - band.start for band in figure.phases}
    for phase, seconds in lengths.items():
        assert f"{phase} {seconds:.3g} s" in shown


def test_names_are_escaped(figure):
    nasty = dataclasses.replace(
        figure,
        title='</text><script>alert("1")</script>',
        summary="a & b",
        layers=[dataclasses.replace(layer, words="<b>") for layer in figure.layers],
    )
    svg = memory_svg(nasty)
    assert elements(svg, "script") == []
    assert "<b>" in texts(svg)
    assert "a & b" in texts(svg)
