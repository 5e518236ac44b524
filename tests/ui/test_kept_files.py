"""Files that are dropped on the page."""

from __future__ import annotations

import json
import os

import pytest

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.ui import kept_files
from lowmem_ft.ui.kept_files import KeptFiles, is_kept_name

CONFIG = json.dumps({"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}}).encode()


@pytest.fixture
def files(tmp_path):
    return KeptFiles(tmp_path / "kept")


def test_a_config_is_kept_without_the_code_that_it_names(files):
    name = files.keep_config(CONFIG)
    assert json.loads((files.model(name) / "config.json").read_text()) == {"model_type": "llama"}
    assert files.keep_config(CONFIG) == name


@pytest.mark.parametrize(
    "content, part",
    [
        (b"not json", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b"{}", "must give model_type"),
        (b'{"a": "' + b"x" * kept_files.MOST_CONFIG_BYTES + b'"}', "at most 262,144 bytes"),
    ],
)
def test_what_is_no_config_is_refused(files, content, part):
    with pytest.raises(UserError, match=part):
        files.keep_config(content)


def test_data_is_of_a_known_kind(files):
    name = files.keep_data(b'{"text": "a"}\n', ".jsonl")
    assert files.data(name).read_bytes() == b'{"text": "a"}\n'
    for suffix in ("", ".py", ".jsonl/../../x"):
        with pytest.raises(UserError, match="A data file must end in"):
            files.keep_data(b"", suffix)


@pytest.mark.parametrize(
    "name", ["", "..", "/etc", "config-../../etc/pass", "config-0123456789abcdeg", "data-x"]
)
def test_no_name_leads_out_of_the_folder(files, name):
    assert not is_kept_name(name)
    assert files.model(name) is files.tokenizer(name) is files.data(name) is None


def test_a_link_is_not_followed(files, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_bytes(CONFIG)
    os.symlink(elsewhere, tmp_path / "kept" / "config-0123456789abcdef")
    assert files.model("config-0123456789abcdef") is None


def test_a_name_of_one_kind_is_no_name_of_another(files):
    assert files.data(files.keep_config(CONFIG)) is None


def test_the_oldest_go_first(files, monkeypatch):
    monkeypatch.setattr(kept_files, "MOST_FILES", 2)
    names = []
    for number in range(3):
        names.append(files.keep_config(json.dumps({"model_type": "llama", "n": number}).encode()))
        os.utime(files.model(names[-1]), (number, number))
    assert [files.model(name) is not None for name in names] == [False, True, True]
