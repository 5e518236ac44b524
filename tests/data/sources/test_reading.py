"""Bad sources explain themselves; good ones of every kind are read."""

import errno
import gzip
import json
import os
import time

import datasets
import pytest
from datasets.exceptions import DatasetNotFoundError

from lowmem_ft.data.files import files
from lowmem_ft.data.files.cache_errors import full_cache
from lowmem_ft.data.files.reading import Source, open_rows
from lowmem_ft.foundation.errors import DataError


def read(path, **settings):
    return list(open_rows(Source(path=str(path), **settings)))


def test_every_kind_of_local_file_is_read(tmp_path, write_jsonl):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    (tmp_path / "data.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "data.csv").write_text("prompt,completion\na,b\nc,d\n")
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "data.parquet")
    for name in (write_jsonl(rows), tmp_path / "data.json", tmp_path / "data.csv", tmp_path / "data.parquet"):
        assert read(name) == rows
        assert read(name, streaming=True) == rows
    (tmp_path / "data.txt").write_text("first line\nsecond line\n")
    assert read(tmp_path / "data.txt") == [{"text": "first line"}, {"text": "second line"}]


@pytest.mark.parametrize("streaming", [False, True])
def test_csv_cells_stay_as_they_are_written(tmp_path, streaming):
    (tmp_path / "data.csv").write_text(',question,answer\n0,What is 3+4?,007\n1,Is it?,None\n2,"a, b",\n')
    rows = read(tmp_path / "data.csv", streaming=streaming)
    assert [row["answer"] for row in rows] == ["007", "None", ""]
    assert rows[2]["question"] == "a, b"


def test_a_glob_reads_its_files_in_the_order_of_their_names(tmp_path, write_jsonl):
    for part in ("b", "a"):
        write_jsonl([{"text": part}], f"part-{part}.jsonl")
    assert read(tmp_path / "part-*.jsonl") == [{"text": "a"}, {"text": "b"}]


def test_a_folder_gives_the_split_its_file_names_say(tmp_path, write_jsonl):
    write_jsonl([{"text": "learn"}], "train.jsonl")
    write_jsonl([{"text": "check"}], "test.jsonl")
    assert read(tmp_path) == [{"text": "learn"}]
    assert read(tmp_path, split="test") == [{"text": "check"}]


def test_a_folder_that_holds_far_more_than_data_is_not_walked_to_its_end(tmp_path, monkeypatch):
    """Such as a home folder, by a path that was cut short."""
    looked_at = []
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: (looked_at.append(seen) or seen for seen in walk(top)))
    monkeypatch.setattr(files, "MOST_BELOW_A_FOLDER", 9)
    for number in range(5):
        (tmp_path / f"{number}" / "inner").mkdir(parents=True)
        (tmp_path / f"{number}" / "rows.jsonl").write_text('{"text": "a"}')
    with pytest.raises(DataError, match="at most 9 files and folders"):
        files.local_files(str(tmp_path))
    assert len(looked_at) < 11  # all of them


def test_a_saved_dataset_is_read(tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list([{"text": "a"}])}).save_to_disk(
        tmp_path / "saved"
    )
    assert read(tmp_path / "saved") == [{"text": "a"}]
    with pytest.raises(DataError, match=r"data\.split=test is not in .*Splits seen: train"):
        read(tmp_path / "saved", split="test")


@pytest.mark.parametrize("streaming", [False, True])
def test_a_malformed_line_is_named_by_file_and_number(tmp_path, streaming):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "good"}\n\n{"text": "bad"\n{"text": "good"}\n')
    with pytest.raises(DataError) as caught:
        for _ in load_stream_or_table(file, streaming):
            pass
    message = str(caught.value)
    assert f"{file}, line 3 is not valid JSON" in message
    assert '{"text": "bad"' in message


def load_stream_or_table(file, streaming):
    from lowmem_ft.data.tokenized_parts import _batches

    source = Source(path=str(file), streaming=streaming)
    return _batches(open_rows(source), source, batch_rows=1)


def test_a_malformed_line_far_into_a_stream_is_named_when_it_is_met(write_jsonl, load):
    path = write_jsonl(
        [{"text": "one two", "other": "x" * 10_000}] * 1100
    )  # more than the 10 MB parsed at once
    with open(path, "a") as file:
        file.write('{"text": }\n')
    data = load(path, streaming=True, shuffle=False)
    with pytest.raises(DataError, match="line 1101 is not valid JSON"):
        for _ in data.train.order(0, 0):
            pass


@pytest.mark.parametrize("streaming", [False, True])
def test_an_unknown_split_lists_those_seen(tmp_path, write_jsonl, streaming):
    write_jsonl([{"text": "a"}], "train.jsonl")
    write_jsonl([{"text": "a"}], "validation.jsonl")
    with pytest.raises(DataError, match=r"data\.split=test is not in .*train.*validation"):
        read(tmp_path, split="test", streaming=streaming)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'org/gated' on the Hub"),
        DatasetNotFoundError("Dataset 'org/gated' is a gated dataset on the Hub."),
    ],
)
def test_an_unreachable_hub_name_says_what_to_do_offline(monkeypatch, error):
    def fail(**_):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError) as caught:
        read("org/gated")
    message = str(caught.value)
    assert str(error) in message
    assert "hf auth login" in message
    assert "hf download org/gated --repo-type dataset --local-dir DIR" in message
    assert "data.path=DIR" in message


@pytest.mark.parametrize("streaming", [False, True])
def test_gzip_tabs_capitals_and_brackets_are_read(tmp_path, streaming):
    row = {"prompt": "a, b", "completion": "c"}
    (tmp_path / "DATA.JSONL").write_text(json.dumps(row) + "\n")
    (tmp_path / "part[1].jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "data.tsv").write_text("prompt\tcompletion\na, b\tc\n")
    with gzip.open(tmp_path / "data.jsonl.gz", "wt") as file:
        file.write(json.dumps(row) + "\n")
    for name in ("DATA.JSONL", "part[1].jsonl", "data.tsv", "data.jsonl.gz"):
        assert read(tmp_path / name, streaming=streaming) == [row], name


def test_a_malformed_line_of_a_gzip_file_is_named(tmp_path):
    with gzip.open(tmp_path / "data.jsonl.gz", "wt") as file:
        file.write('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"data\.jsonl\.gz, line 2 is not valid JSON"):
        read(tmp_path / "data.jsonl.gz")


@pytest.mark.parametrize(
    "sample_by, expected",
    [("line", ["a", "b", "", "c"]), ("paragraph", ["a\nb", "c\n"]), ("document", ["a\nb\n\nc\n"])],
)
def test_a_text_file_is_cut_as_asked_and_its_byte_order_mark_is_no_text(tmp_path, sample_by, expected):
    (tmp_path / "book.txt").write_bytes(b"\xef\xbb\xbfa\nb\n\nc\n")
    assert [row["text"] for row in read(tmp_path / "book.txt", sample_by=sample_by)] == expected


def test_settings_that_the_source_cannot_obey_are_refused(tmp_path, write_jsonl):
    path = write_jsonl([{"text": "a"}])
    for settings in ({"name": "main"}, {"revision": "v1"}, {"data_files": ["a"]}, {"sample_by": "document"}):
        (key,) = settings
        with pytest.raises(DataError, match=rf"data\.{key}="):
            read(path, **settings)
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"data\.split=test is not in .*Splits seen: train"):
        read(tmp_path / "saved", split="test")


def test_a_folder_of_several_kinds_is_warned_about_and_csv_cells_stay_text(tmp_path, write_jsonl, caplog):
    (tmp_path / "train.csv").write_text("text\n007\n")
    assert read(tmp_path) == [{"text": "007"}]
    assert not caplog.records
    write_jsonl([{"text": "a"}, {"text": "b"}], "other.jsonl")
    read(tmp_path)
    assert "1 .csv, 1 .jsonl" in caplog.text


def test_without_a_hub_a_name_fails_at_once_and_leaves_no_setting_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("lowmem_ft.data.files.reading.hub_is_reachable", lambda: False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gsm.jsonl").write_text("{}")
    waits = []  # between the hub client's retries
    monkeypatch.setattr(time, "sleep", waits.append)
    with pytest.raises(DataError, match=r"gsm\.jsnl .*Did you mean `gsm\.jsonl`"):
        read("gsm.jsnl")
    assert not waits
    assert datasets.config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_is_not_the_files_fault(tmp_path, monkeypatch, number):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    in_cache = OSError(number, os.strerror(number), str(tmp_path / "cache" / "json" / "a.lock"))
    assert f"HF_DATASETS_CACHE={tmp_path / 'cache'}, cannot be written" in str(full_cache(in_cache))
    assert full_cache(OSError(number, os.strerror(number), str(tmp_path / "rows.jsonl"))) is None
