"""What is being replaced stays until what replaces it is whole."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from lowmem_ft.foundation.system.atomic_write import whole_file, whole_folder, write_whole_file
from lowmem_ft.training.folder.own_files import replace_saved


def test_a_folder_gets_its_name_once_it_is_whole(tmp_path):
    target = tmp_path / "deep" / "model"
    with whole_folder(target, replace_saved) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "weights").write_text("new")
        assert not target.exists()
    assert (target / "inner" / "weights").read_text() == "new"
    assert [path.name for path in target.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_folder_that_fails_leaves_the_old_one_and_nothing_else(tmp_path, error):
    target = tmp_path / "model"
    target.mkdir()
    (target / "weights").write_text("old")

    def fail():
        with whole_folder(target, replace_saved) as folder:
            (folder / "weights").write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert (target / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("name", ["tokenizer.json", ".tmpCzRbEw"], ids=["ours", "safetensors' own"])
def test_what_a_killed_process_left_half_written_does_not_get_in(tmp_path, name):
    (tmp_path / "model.incomplete").mkdir()
    (tmp_path / "model.incomplete" / name).write_text("half")
    with whole_folder(tmp_path / "model", replace_saved) as folder:
        (folder / "weights").write_text("new")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["weights"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
@pytest.mark.parametrize("umask,usual", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_files_of_a_new_folder_are_read_by_whom_the_umask_lets(tmp_path, umask, usual):
    """Whatever a library wrote them with: safetensors 0.8 writes for the user alone."""
    (tmp_path / "model").mkdir()
    own = tmp_path / "model" / "notes.txt"
    own.write_text("mine")
    own.chmod(0o600)
    before = os.umask(umask)
    try:
        with whole_folder(tmp_path / "model", replace_saved) as folder:
            save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
            (folder / "inner").mkdir()
            for name in ("config.json", "inner/private", "run.sh"):
                (folder / name).write_text("new")
            (folder / "inner" / "private").chmod(0o600)
            (folder / "run.sh").chmod(0o700)
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").rglob("*") if path.is_file()
    }
    assert modes == {
        **dict.fromkeys(("model.safetensors", "config.json", "private"), usual),
        "run.sh": 0o700 | usual,
        "notes.txt": 0o600,
    }


@pytest.mark.parametrize("place", ["model", "model.incomplete", "model.old"])
def test_somebodys_own_files_are_in_the_new_folder_too(tmp_path, place):
    """The last two, if a process was killed while it replaced the folder."""
    target = tmp_path / "model"
    target.mkdir()
    for name in ("notes.txt", "mine/config.json", "mine/empty/"):
        own = tmp_path / place / name
        (own if name.endswith("/") else own.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            own.write_text("mine")
    (tmp_path / place / "model.safetensors").write_text("old")
    with whole_folder(target, replace_saved) as folder:
        (folder / "config.json").write_text("new")
    assert (target / "notes.txt").read_text() == (target / "mine" / "config.json").read_text() == "mine"
    assert (target / "mine" / "empty").is_dir()
    assert (target / "config.json").read_text() == "new"
    assert not (target / "model.safetensors").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_that_fails_leaves_the_old_one_and_nothing_else(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    write_whole_file(file, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_whole_file(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_two_writers_of_a_cache_do_not_meet_and_the_later_one_stays(tmp_path):
    file = tmp_path / "kept"
    with whole_file(file, is_cache=True) as first:
        first.write(b"first")
        with whole_file(file, is_cache=True) as second:
            second.write(b"second")
        assert file.read_bytes() == b"second"
    assert file.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [file]
