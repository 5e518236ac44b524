"""What a step took on this processor is kept between runs."""

from __future__ import annotations

import dataclasses

import pytest

from lowmem_ft.foundation.user_paths import KEPT_FOLDER_VARIABLE
from lowmem_ft.system.timed_steps import (
    FILE_NAME,
    MOST_KEPT,
    TimedStep,
    keep_timed_step,
    this_processor,
    timed_steps,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "kept"))
    return tmp_path / "kept"


def step(**changes):
    values = {"dtype": "float32", "reference_seconds": 1.0, "seconds": 2.0, "threads": 2, "model": "a model"}
    return TimedStep(**{"processor": this_processor(), "date": "2026-11-27", **values, **changes})


def test_a_step_is_kept_and_replaces_one_of_the_same_work(folder):
    assert timed_steps() == []
    keep_timed_step(step())
    keep_timed_step(step(reference_seconds=5.0))
    keep_timed_step(step(seconds=3.0))
    assert timed_steps() == [step(reference_seconds=5.0), step(seconds=3.0)]


def test_steps_of_another_processor_are_not_of_this_one(folder):
    keep_timed_step(step(processor="another, 64 cores"))
    assert timed_steps() == []


def test_the_oldest_go_first(folder):
    for number in range(1, MOST_KEPT + 3):
        keep_timed_step(step(reference_seconds=float(number)))
    assert [one.reference_seconds for one in timed_steps()] == [float(n) for n in range(3, MOST_KEPT + 3)]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"7",
        b"[7]",
        b'[{"dtype": "float32"}]',
        b'[{"dtype": "float32", "seconds": "soon"}]',
        b"\xff\xfe",
    ],
)
def test_a_damaged_file_is_not_used_and_is_replaced(folder, content):
    folder.mkdir()
    (folder / FILE_NAME).write_bytes(content)
    assert timed_steps() == []
    keep_timed_step(step())
    assert timed_steps() == [step()]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_seconds_are_above_zero(seconds):
    with pytest.raises(ValueError, match="seconds are above 0"):
        dataclasses.replace(step(), seconds=seconds)


def test_off_keeps_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, "off")
    keep_timed_step(step())
    assert timed_steps() == []
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(KEPT_FOLDER_VARIABLE, str(tmp_path / "file"))
    with caplog.at_level("INFO"):
        keep_timed_step(step())
    assert "are not kept" in caplog.text
