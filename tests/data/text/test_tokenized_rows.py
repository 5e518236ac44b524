"""Many rows are tokenized by a process on each core, once; the log says how fast, and when they come from the cache."""

from __future__ import annotations

import errno
import logging
import os
import signal

import datasets
import numpy as np
import pytest
from datasets.arrow_writer import ArrowWriter

from lowmem_ft.data.text import tokenized_rows
from lowmem_ft.data.text.tokenizing import Tokenization
from lowmem_ft.foundation.errors import DataError


@pytest.fixture
def path(write_jsonl):
    return write_jsonl([{"prompt": f"{n}", "completion": f" {n}"} for n in range(3000)])


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO)

    def read():
        lines = [line for line in caplog.messages if line.startswith(("Tokenized ", "The tokens of "))]
        caplog.clear()
        return lines

    return read


def test_many_rows_are_tokenized_on_all_cores_and_few_in_this_process(path, load, said, monkeypatch):
    monkeypatch.setattr(tokenized_rows, "usable_cores", lambda: 100)
    one = load(path)
    (line,) = said()
    assert line.startswith("Tokenized 3,000 rows of ")
    assert line.endswith("rows/s, processes: 1.")
    monkeypatch.setattr(tokenized_rows, "FEW_ROWS", 2999)
    many = load(path, max_length=100)
    assert said()[0].endswith("processes: 3.")  # a batch for each
    assert many.fingerprint == one.fingerprint
    assert np.array_equal(many.train.row_lengths, one.train.row_lengths)


@pytest.mark.parametrize("few_rows,processes", [(20_000, 1), (2999, 2)])
def test_a_second_run_takes_the_tokens_from_the_cache(path, load, said, monkeypatch, few_rows, processes):
    monkeypatch.setattr(tokenized_rows, "FEW_ROWS", few_rows)
    monkeypatch.setattr(tokenized_rows, "usable_cores", lambda: 2)
    load(path)
    assert said()[0].endswith(f"processes: {processes}.")
    load(path)
    (line,) = said()
    assert line.endswith("come from the cache of an earlier run.")


def test_processes_that_tokenize_leave_ctrl_c_to_the_one_that_started_them(path, load, said, monkeypatch):
    here, tokenize = os.getpid(), Tokenization.__call__

    def interrupted(self, columns, numbers):
        if os.getpid() != here:  # a terminal sends SIGINT to all processes
            os.kill(os.getpid(), signal.SIGINT)
        return tokenize(self, columns, numbers)

    monkeypatch.setattr(Tokenization, "__call__", interrupted)
    load(path, num_proc=2)
    assert said()[0].endswith("processes: 2.")


@pytest.mark.parametrize("after", ["nothing", "the rows"])
def test_a_full_disk_is_said_with_the_folder_that_can_be_elsewhere(path, load, monkeypatch, after):
    if after == "the rows":
        load(path, max_length=100)

    def finalize(self, close_stream=True):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrowWriter, "finalize", finalize)
    with pytest.raises(
        DataError, match=r"The cache of datasets, .*: No space left on device \(.* free on that"
    ):
        load(path)


def test_a_full_disk_of_a_saved_dataset_is_named_by_its_folder(tmp_path, load, monkeypatch):
    """Rows of ``save_to_disk`` have their tokens next to them, wherever the cache is."""
    datasets.Dataset.from_list([{"text": "a line"}] * 8).save_to_disk(tmp_path / "saved")

    def finalize(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArrowWriter, "finalize", finalize)
    with pytest.raises(DataError, match=r"The folder .*/saved, where .*: No space left .*move it to another"):
        load(tmp_path / "saved")


def test_a_number_of_processes_that_is_given_holds(path, load, said, monkeypatch):
    monkeypatch.setattr(tokenized_rows, "FEW_ROWS", 2999)
    load(path, num_proc=1)
    assert said()[0].endswith("processes: 1.")
