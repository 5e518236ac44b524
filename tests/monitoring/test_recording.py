"""A snapshot has what happened in its block, and recording ends with it."""

from __future__ import annotations

import pickle
import pickletools

import pytest
import torch

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.monitoring import record_snapshot


@pytest.fixture
def driver(cuda_driver):
    return cuda_driver()


def entries_in(path):
    return pickle.loads(path.read_bytes())["device_traces"][0]


def test_a_block_is_recorded_and_then_no_more(driver, tmp_path):
    path = tmp_path / "run.pickle"
    with record_snapshot(path, max_entries=50):
        assert driver.history == {"context": "all", "stacks": "python", "max_entries": 50}
        driver.hold(10, 20)
    assert driver.history is None
    assert len(entries_in(path)) == 1
    protocol = next(pickletools.genops(path.read_bytes()))[1]
    assert protocol <= 4  # the viewer knows no later one


def test_a_block_that_fails_is_written_too(driver, tmp_path):
    def fails():
        driver.hold(10, 20)
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError), record_snapshot(tmp_path / "run.pickle"):
        fails()
    assert driver.history is None
    assert len(entries_in(tmp_path / "run.pickle")) == 1


def test_recording_ends_though_the_file_cannot_be_written(driver, tmp_path):
    path = tmp_path / "folder" / "run.pickle"
    path.parent.mkdir()
    with pytest.raises(FileNotFoundError), record_snapshot(path):
        path.parent.rmdir()
    assert driver.history is None


@pytest.mark.parametrize(
    "holds,max_entries,said", [(0, 5, "no allocation"), (5, 5, "begins later"), (4, 5, "4 allocations")]
)
def test_what_is_missing_is_said(driver, tmp_path, caplog, holds, max_entries, said):
    with caplog.at_level("INFO"), record_snapshot(tmp_path / "run.pickle", max_entries=max_entries):
        for _ in range(holds):
            driver.hold(10, 20)
    assert said in caplog.text


def test_bad_arguments_are_told_before_anything_runs(driver, tmp_path):
    with (
        pytest.raises(UserError, match="folder that exists") as error,
        record_snapshot(tmp_path / "missing" / "run.pickle", max_entries=0),
    ):
        pytest.fail("ran")
    assert "at least 1, got 0" in str(error.value)
    with pytest.raises(UserError, match="is a file"), record_snapshot(tmp_path):
        pytest.fail("ran")


def test_a_cpu_has_no_such_history(tmp_path):
    with pytest.raises(UserError, match="no CUDA device here"), record_snapshot(tmp_path / "run.pickle"):
        pytest.fail("ran")


def test_inside_a_virtual_gpu_it_is_the_trace_of_the_block(tmp_path):
    with VirtualGPU("t4"):
        kept = torch.zeros(1000, device="cuda")
        with record_snapshot(tmp_path / "run.pickle"):
            more = [torch.zeros(2000, device="cuda") for _ in range(3)]
            with record_snapshot(tmp_path / "inner.pickle", max_entries=1):
                more.pop()
        del kept
    sizes = [entry["size"] for entry in entries_in(tmp_path / "run.pickle") if entry["action"] == "alloc"]
    assert sizes == [8000] * 3
    assert [entry["action"] for entry in entries_in(tmp_path / "inner.pickle")] == ["free_completed"]
    blocks = pickle.loads((tmp_path / "run.pickle").read_bytes())["segments"][0]["blocks"]
    assert sorted(b["requested_size"] for b in blocks if b["state"] == "active_allocated") == [
        4000,
        8000,
        8000,
    ]
