"""The seconds of a step on this processor are kept between runs."""

from __future__ import annotations

import dataclasses
import json

import pytest

from lowmem_ft.foundation.catalog.timed_steps import FILE_NAME, MOST_KEPT, keep_timed_step, timed_steps
from lowmem_ft.foundation.memory.cpu_step_time import TimedStep
from lowmem_ft.foundation.memory.step_work import StepWork
from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE

WORK = StepWork(flops=1e9, num_bytes=1e8, num_operators=1000, dtype="float32", tokens=512)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def step(seconds=2.0, **work):
    return TimedStep(
        work=dataclasses.replace(WORK, **work),
        tokens=500.0,
        seconds=seconds,
        model="a model",
        date="2026-11-27",
    )


def test_a_step_is_kept_and_replaces_one_of_the_same_work(folder):
    assert timed_steps(2) == []
    keep_timed_step(step(), 2)
    keep_timed_step(step(flops=5e9), 2)
    keep_timed_step(step(3.0), 2)
    assert timed_steps(2) == [step(flops=5e9), step(3.0)]


def test_steps_with_other_threads_are_kept_and_do_not_count(folder):
    keep_timed_step(step(), 2)
    keep_timed_step(step(4.0), 1)
    assert timed_steps(1) == [step(4.0)]
    assert timed_steps(2) == [step()]


@pytest.mark.parametrize("name", ["processor", "software"])
def test_steps_of_another_machine_or_version_are_not_of_this_one(folder, name):
    keep_timed_step(step(), 2)
    (row,) = json.loads((folder / FILE_NAME).read_text())
    (folder / FILE_NAME).write_text(json.dumps([row | {name: "another"}]))
    assert timed_steps(2) == []
    keep_timed_step(step(3.0), 2)
    assert len(json.loads((folder / FILE_NAME).read_text())) == 2


def test_the_oldest_go_first(folder):
    for number in range(1, MOST_KEPT + 3):
        keep_timed_step(step(flops=number * 1e9), 2)
    assert [one.work.flops for one in timed_steps(2)] == [n * 1e9 for n in range(3, MOST_KEPT + 3)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[7]",
        b"[" * 100_000,
        b'[{"work": [], "seconds": "soon"}]',
        b"\xff\xfe",
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_damaged_file_is_not_used_and_is_replaced(folder, content):
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(content)
    assert timed_steps(2) == []
    keep_timed_step(step(), 2)
    assert timed_steps(2) == [step()]


@pytest.mark.parametrize(
    "field, value", [("threads", 1e999), ("seconds", -1), ("seconds", None), ("tokens", 0)]
)
def test_a_damaged_row_is_left_out(folder, field, value):
    keep_timed_step(step(), 2)
    keep_timed_step(step(flops=5e9), 2)
    rows = json.loads((folder / FILE_NAME).read_text())
    rows[0][field] = value
    (folder / FILE_NAME).write_text(json.dumps(rows))
    assert timed_steps(2) == [step(flops=5e9)]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_seconds_are_above_zero(seconds):
    with pytest.raises(ValueError, match="seconds and tokens above 0"):
        step(seconds)


def test_off_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, "off")
    keep_timed_step(step(), 2)
    assert timed_steps(2) == []
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "file"))
    with caplog.at_level("INFO"):
        keep_timed_step(step(), 2)
    assert "are not kept" in caplog.text
