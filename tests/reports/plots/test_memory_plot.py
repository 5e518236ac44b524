from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import struct
from html.parser import HTMLParser

import pytest

from lowmem_ft.foundation.errors import MissingPackageError, UserError
from lowmem_ft.foundation.units import GIB, MIB
from lowmem_ft.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.memory.allocator.replay import replay
from lowmem_ft.memory.memory_estimate import DeviceLimit
from lowmem_ft.memory.timeline import Allocation, Timeline
from lowmem_ft.reports.plots.memory_plot import check_plot_path, write_plot
from lowmem_ft.reports.plots.memory_series import sample_memory
from lowmem_ft.reports.plots.plot_frame import PlotFrame, band_label


class Page(HTMLParser):
    """Text, tags and data of a page; fails if an element is closed that was not open."""

    VOID = ("meta", "rect", "line", "circle", "polygon")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def page_of(tmp_path):
    def write_and_read(estimate) -> Page:
        path = tmp_path / "memory.html"
        write_plot(path, estimate)
        return Page(path.read_text(encoding="utf-8"))

    return write_and_read


def data_of(page: Page) -> dict:
    return json.loads(re.search(r'\{"phases".*\}', page.text)[0])  # pyright: ignore[reportOptionalSubscript]


def test_the_page_loads_nothing(estimate, page_of):
    page = page_of(estimate)
    assert page.open == []
    assert not [attributes for _, attributes in page.tags if {"src", "href"} & attributes.keys()]
    assert "url(" not in page.text
    assert "import" not in page.text


def test_the_page_holds_the_moments_that_the_allocator_replay_has(estimate, page_of):
    data = data_of(page_of(estimate))
    totals = [sum(row[3:]) for row in data["samples"]]
    counted = replay(estimate.timeline, CachingAllocator())
    assert max(totals) == counted.peak_allocated_bytes == estimate.allocated_peak_bytes
    highest = data["samples"][totals.index(max(totals))]
    assert data["phases"][highest[1]] == "backward"
    assert data["modules"][highest[2]] == "mlp of layer 1"


def test_a_cpu_takes_what_was_asked_for(estimate, page_of):
    on_cpu = dataclasses.replace(estimate, gpu=DeviceLimit(name="cpu (x86_64)", memory_bytes=0))
    page = page_of(on_cpu)
    assert "memory of cpu" not in page.text
    totals = [sum(row[3:]) for row in data_of(page)["samples"]]
    assert max(totals) == max(estimate.timeline.live_bytes()) < estimate.allocated_peak_bytes


def test_the_page_marks_peak_phases_and_the_gpus_memory(estimate, page_of):
    page = page_of(estimate)
    assert "in backward, mlp of layer 1" in page.text
    assert "memory of small-gpu: 2.00 GiB" in page.text
    assert sum(attributes.get("class") == "band" for _, attributes in page.tags) == 6
    areas = [attributes for tag, attributes in page.tags if tag == "polygon"]
    assert len(areas) == 6  # nothing is a workspace or an input
    numbers = [
        float(number) for area in areas for pair in area["points"].split() for number in pair.split(",")
    ]
    assert min(numbers) >= 0
    assert max(numbers) <= 1000


def test_the_table_says_the_same_without_a_script(estimate, page_of):
    page = page_of(estimate)
    rows = page.text[page.text.index("as a table") :]
    assert re.search(r"backward924 MiB200 MiB400 MiB200 MiB60.0 MiB0 B64.0 MiBmlp of layer 1", rows)


def test_names_cannot_break_out_of_the_page(estimate, page_of):
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=1024, module="</script><b>bold"))
    nasty = dataclasses.replace(
        estimate, timeline=timeline, model=dataclasses.replace(estimate.model, name="<b>&")
    )
    page = page_of(nasty)
    assert "b" not in [tag for tag, _ in page.tags]
    assert "<b>& fits on small-gpu" in page.text
    assert data_of(page)["modules"] == ["</script><b>bold"]


def test_a_long_run_makes_a_page_of_less_than_two_megabytes(estimate, tmp_path):
    timeline = Timeline()
    for index in range(50_000):
        module = f"model.layers.{index % 126}.mlp.down_proj"
        timeline.free(timeline.malloc(Allocation(size_bytes=index + MIB, module=module)))
    path = tmp_path / "memory.html"
    write_plot(path, dataclasses.replace(estimate, timeline=timeline))
    assert 10_000 < path.stat().st_size < 2_000_000


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plots`")
def test_a_picture_is_a_png(estimate, tmp_path):
    path = tmp_path / "memory.png"
    write_plot(path, estimate)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width > height > 500


def test_a_picture_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        MissingPackageError, match=r"memory\.png needs the package matplotlib.*lowmem-ft\[plots\]"
    ):
        check_plot_path(tmp_path / "memory.png")


@pytest.mark.parametrize("name", ["memory.pdf", "memory", "memory.htm"])
def test_another_suffix_is_refused(estimate, tmp_path, name):
    with pytest.raises(UserError, match=r"--plot writes \.html or \.png, got .* Name it memory\.html\."):
        write_plot(tmp_path / name, estimate)


def test_an_estimate_without_a_timeline_is_refused(estimate, tmp_path):
    with pytest.raises(UserError, match="one without allocations"):
        write_plot(tmp_path / "memory.html", dataclasses.replace(estimate, timeline=Timeline()))


@pytest.mark.parametrize("memory_bytes,shown", [(2 * GIB, False), (GIB, True), (GIB // 2, True)])
def test_the_gpus_memory_is_drawn_unless_it_would_flatten_the_rest(estimate, memory_bytes, shown):
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=900 * MIB))
    on = dataclasses.replace(estimate, gpu=DeviceLimit(name="x", memory_bytes=memory_bytes))
    assert PlotFrame.around(on, sample_memory(timeline)).shows_limit is shown


@pytest.mark.parametrize("top_bytes", [1, 700, 5 * MIB, 1023 * MIB, GIB, 43 * GIB, 999 * GIB, 3000 * GIB])
def test_ticks_are_few_and_within_the_axis(top_bytes):
    frame = PlotFrame(start=0, end=1, top_bytes=top_bytes, shows_limit=False, limit_words="")
    assert 1 < len(frame.ticks_bytes) <= 7
    assert frame.ticks_bytes[0] == 0
    assert frame.ticks_bytes[-1] <= top_bytes


def test_a_phase_is_named_where_its_name_has_room():
    frame = PlotFrame(start=0, end=1000, top_bytes=1, shows_limit=False, limit_words="")
    assert band_label(frame, "forward", 100, 170) == "forward"
    assert band_label(frame, "optimizer_step", 100, 170) == ""
