"""Which data is looked at before torch is imported; what is said of it stands in the table of bad inputs."""

from __future__ import annotations

import datasets
import pytest
from tiny_models import TINY
from transformers import AutoTokenizer

from lowmem_ft.data import early_checks
from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.early_checks import check_small_local_data
from lowmem_ft.data.loading import load_data
from lowmem_ft.foundation.errors import DataError


@pytest.fixture
def data(tmp_path, monkeypatch):
    """Two texts, of which the second is none."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one"}\n{"text": {"two": 2}}\n')
    return str(file)


def test_held_out_data_is_looked_at_too(data, tmp_path):
    (tmp_path / "good.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(DataError, match=r"Example 1 of .*data\.jsonl"):
        check_small_local_data(DataConfig(path=str(tmp_path / "good.jsonl"), eval_path=data))


def test_streams_large_files_and_hub_names_are_left_for_later(data, monkeypatch):
    check_small_local_data(DataConfig(path=data, streaming=True))
    check_small_local_data(DataConfig(path="org/dataset"))
    monkeypatch.setattr(early_checks, "MOST_BYTES", 10)
    check_small_local_data(DataConfig(path=data))


def test_no_more_than_the_first_rows_are_read(data, monkeypatch):
    monkeypatch.setattr(early_checks, "NUM_ROWS", 1)
    check_small_local_data(DataConfig(path=data))


def test_rows_are_not_empty_because_the_first_are(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(early_checks, "NUM_ROWS", 1)
    (tmp_path / "late.jsonl").write_text('{"text": ""}\n{"text": "two"}\n')
    check_small_local_data(DataConfig(path=str(tmp_path / "late.jsonl")))


def test_what_was_looked_at_is_in_the_cache_of_the_run(data, tmp_path):
    check_small_local_data(DataConfig(path=data, max_samples=1))
    (written,) = (tmp_path / "cache").rglob("json-*.arrow")
    before = written.stat()
    load_data(
        DataConfig(path=data, max_samples=1, max_length=64),
        AutoTokenizer.from_pretrained(TINY),
        max_positions=None,
        seed=0,
        attn_implementation="sdpa",
    )
    assert list((tmp_path / "cache").rglob("json-*.arrow")) == [written]
    assert written.stat().st_mtime_ns == before.st_mtime_ns


def test_bars_are_shown_again_afterwards(data):
    were_disabled = datasets.are_progress_bars_disabled()
    check_small_local_data(DataConfig(path=data, max_samples=1))
    assert datasets.are_progress_bars_disabled() is were_disabled
