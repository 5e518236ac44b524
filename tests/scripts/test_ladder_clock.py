"""The ladder's table by the clock: what overlaps is faster for it, and what copies cost is told."""

from __future__ import annotations

import argparse
from unittest import mock

import ladder_clock
import pytest
from ladder_rungs import RUNGS
from tiny_models import save_llama


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_llama(
        folder,
        layers=3,
        hidden=4096,
        inner=8192,
        heads=32,
        vocab_size=1000,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    arguments = argparse.Namespace(model=str(folder), tokens=4096, accumulation=16, gpus=["a100-80gb"])
    with mock.patch.object(ladder_clock, "RUNGS", RUNGS[4:7]):  # three around the one that is compared with
        return {row["rung"]: row for row in ladder_clock.on_clock(arguments)}


def test_every_rung_that_fits_is_set_beside_the_resident_one(rows):
    assert rows["+ step in backward"]["of_resident"] == 1
    headings, *lines = ladder_clock.lines_of(list(rows.values()))
    assert len(lines) == 3
    assert all(len(line) == len(headings) for line in lines)


@pytest.mark.parametrize("rung", ["+ state on the host", "+ weights streamed"])
def test_updates_beside_the_forward_pass_save_time(rows, rung):
    row = rows[rung]
    assert row["step_seconds"] < 0.98 * row["step_seconds_without_overlap"]
    assert 0 < row["cost_shares"]["copies"] < 1


def test_where_nothing_waits_on_the_host_nothing_overlaps(rows):
    row = rows["+ step in backward"]
    assert row["step_seconds"] == row["step_seconds_without_overlap"]
    assert row["cost_shares"]["copies"] == pytest.approx(0, abs=1e-3)
