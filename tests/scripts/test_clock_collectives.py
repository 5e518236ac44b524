"""Public timings of collectives beside the clock's."""

import json

import pytest
from clock_against_public import PAGE
from clock_collectives import COLLECTIVES, LARGE_BYTES, CollectiveRow, load_rows
from marked_table import cells_of

from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu

ROWS = load_rows()


def test_every_row_is_of_the_catalogue_and_of_a_page_with_a_commit_and_a_licence():
    source = json.loads(COLLECTIVES.read_text(encoding="utf-8"))["source"]
    assert "/blob/" in source["url"]
    assert source["license"] == "Apache-2.0"
    assert {find_gpu(row.gpu).name for row in ROWS} == {"h100-80gb", "b200"}
    assert len(set(ROWS)) == len(ROWS) > 50


def test_a_sum_among_two_sends_what_it_sums_once_and_takes_its_start():
    row = CollectiveRow(
        gpu="h100-80gb", collective="all_reduce", devices=2, bytes=36 * 10**9, bytes_per_second=1
    )
    assert row.predicted_seconds == pytest.approx(0.1 + 40e-6)  # at 360 GB/s
    assert row.seconds == 36 * 10**9


def test_large_collectives_of_eight_are_near_and_the_page_has_every_row():
    assert max(abs(row.error) for row in ROWS if row.devices == 8 and row.bytes >= LARGE_BYTES) < 0.2
    cells = cells_of(PAGE.read_text(encoding="utf-8"), "clock_collectives.py")
    assert [row[-1] for row in cells if row[-1].endswith("%")][-len(ROWS) :] == [
        f"{row.error:+.0%}" for row in ROWS
    ]
