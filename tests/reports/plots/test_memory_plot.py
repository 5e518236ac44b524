from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import struct

import pytest
from drawings import Page, elements

from lowmem_ft.foundation.errors import MissingPackageError, UserError
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.foundation.units import MIB, format_bytes
from lowmem_ft.reports.plots.memory_plot import check_plot_path, write_plot


@pytest.fixture
def page_of(tmp_path):
    def write_and_read(estimate) -> Page:
        path = tmp_path / "memory.html"
        write_plot(path, estimate)
        return Page(path.read_text(encoding="utf-8"))

    return write_and_read


def data_of(page: Page) -> dict:
    return json.loads(re.search(r'\{"moments".*\}', page.text)[0])  # pyright: ignore[reportOptionalSubscript]


def test_the_page_has_the_numbers_of_the_json(played, page_of):
    page = page_of(played)
    data, device = data_of(page), played.to_json()["device"]
    totals = [sum(sizes) for sizes in zip(*(layer["bytes"] for layer in data["layers"]), strict=True)]
    assert max(totals) == device["process_peak_bytes"]
    held = {layer["words"]: layer["bytes"][data["peak"]] for layer in data["layers"]}
    assert held["context, libraries"] == device["process_peak_bytes"] - device["reserved_peak_bytes"]
    tensors = totals[data["peak"]] - held["context, libraries"] - held["cached, not in use"]
    assert tensors == device["allocated_peak_bytes"]
    assert data["places"][data["place"][data["peak"]]] == "backward, mlp of layer 1"
    assert f"the process takes {format_bytes(device['process_peak_bytes'])}" in page.text
    assert data["end"] == pytest.approx(3.0)


def test_the_page_is_drawn_for_a_phone_and_for_a_screen(played, page_of):
    page = page_of(played)
    widths = [float(attributes["width"]) for tag, attributes in page.tags if tag == "svg"]
    assert widths == [390, 960]
    assert "small-gpu has 2.00 GiB" in page.text


def test_the_table_says_the_same_without_a_script(played, page_of):
    page = page_of(played)
    rows = page.text[page.text.index("as a table") :]
    total, context = played.process_peak_bytes, played.process_peak_bytes - played.reserved_peak_bytes
    assert f"backward{format_bytes(total)}{format_bytes(context)}200 MiB400 MiB200 MiB60.0 MiB" in rows


def test_names_cannot_break_out_of_the_page(played, page_of):
    timeline = Timeline()
    timeline.malloc(Allocation(size_bytes=1024, module="</script><b>bold"))
    nasty = dataclasses.replace(
        played,
        timeline=timeline,
        playback=None,
        model=dataclasses.replace(played.model, name='<b>&"<script>alert(1)'),
        gpu=dataclasses.replace(played.gpu, name="<i>"),
    )
    page = page_of(nasty)
    page.check_loads_nothing()
    assert not {"b", "i"} & {tag for tag, _ in page.tags}
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert '<b>&"<script>alert(1)' in page.text
    assert data_of(page)["places"] == ["forward, </script><b>bold"]


def test_a_long_run_makes_a_page_of_less_than_a_megabyte(estimate, tmp_path):
    timeline = Timeline()
    for index in range(20_000):
        module = f"model.layers.{index % 126}.mlp.down_proj"
        timeline.free(timeline.malloc(Allocation(size_bytes=index + MIB, module=module)))
    path = tmp_path / "memory.html"
    write_plot(path, dataclasses.replace(estimate, timeline=timeline))
    assert 10_000 < path.stat().st_size < 1_000_000


def test_a_drawing_is_a_file_of_its_own(played, tmp_path):
    path = tmp_path / "memory.svg"
    write_plot(path, played)
    svg = path.read_text("utf-8")
    assert len(elements(svg, "path")) == 8
    assert "prefers-color-scheme: dark" in svg
    assert 'xmlns="http://www.w3.org/2000/svg"' in svg


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra `plots`")
def test_a_picture_is_a_png(played, tmp_path):
    path = tmp_path / "memory.png"
    write_plot(path, played)
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
    with pytest.raises(
        UserError, match=r"--plot writes \.html, \.svg or \.png, got .* Name it memory\.html\."
    ):
        write_plot(tmp_path / name, estimate)
