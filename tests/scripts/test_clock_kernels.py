"""Public timings of single kernels: where they are from, what is fitted to them, and when a kind is known."""

import dataclasses
import json

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from clock_kernels import CLOCKED, KERNELS, PROFILES, Score, fitted, load_rows

from lowmem_ft.foundation.catalog.clock_rates import rate_entries
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu
from lowmem_ft.virtual_gpu.calls.kernel_kinds import KERNEL_KINDS

ROWS = load_rows()


def test_every_row_has_a_source_with_a_commit_a_kind_and_a_gpu_of_the_catalogue():
    sources = json.loads(KERNELS.read_text(encoding="utf-8"))["sources"]
    assert len(ROWS) > 700
    for row in ROWS:
        assert sources[row.source]["url"].startswith("https://")
        assert sources[row.source]["versions"]
        assert row.kind in KERNEL_KINDS
        assert find_gpu(row.gpu).name == row.gpu
        assert row.seconds > 0 < row.bytes


def test_a_kind_is_known_where_rows_tell_it_or_where_boards_tell_each_other():
    elsewhere = set(next(entry["known_kinds"] for entry in rate_entries() if "kernels" in entry))
    for entry in rate_entries():
        boards = [entry["compute_capability"]] if "compute_capability" in entry else entry.get("gpus", [])
        told = {row.kind for row in ROWS if row.board in boards}
        assert set(entry.get("known_kinds", ())) <= told | elsewhere


def test_programs_of_one_publisher_are_left_out_together():
    engines = {row.publisher for row in ROWS if row.source.startswith("aiconfigurator")}
    assert engines == {"aiconfigurator"}


def test_boards_with_an_entry_of_their_own_say_nothing_about_their_architecture():
    boards = {row.gpu: row.board for row in ROWS}
    assert boards["rtx-4090"] == boards["l40"] != boards["l40s"] == "8.9"


@pytest.mark.parametrize(
    "errors, is_known", [([0.1, -0.12, 0.4], True), ([0.1, 0.1, -0.41], False), ([0.2, 0.2, 0.1], False)]
)
def test_a_kind_is_known_by_its_median_and_its_worst_error(errors, is_known):
    assert Score(group="products", board="9.0", rows=[], errors=errors).is_known == is_known


def test_a_fit_takes_the_median_of_what_the_sources_tell():
    rates = find_gpu("a100-80gb").rates
    row = next(row for row in ROWS if row.kind == "element-wise" and row.gpu == "a100-80gb-pcie")
    rows = []
    for source, share in (("one", 0.8), ("two", 0.82), ("hot", 0.4)):
        seconds = row.predicted(dataclasses.replace(rates, bandwidth=share))
        rows.append(dataclasses.replace(row, source=source, seconds=seconds))
    assert fitted("element-wise", rows, rates).bandwidth == pytest.approx(0.8, rel=0.02)


def test_every_profile_has_a_prediction_by_its_kinds():
    profiles = json.loads(PROFILES.read_text(encoding="utf-8"))
    clocked = json.loads(CLOCKED.read_text(encoding="utf-8"))
    assert [each.keys() for each in clocked] == [profile["seconds_by_kind"].keys() for profile in profiles]
