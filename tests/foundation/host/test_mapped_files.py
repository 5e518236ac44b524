"""Memory in files is the disk's, not RAM's, and nothing is left of it."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lowmem_ft.foundation.errors import DoesNotFitError, UserError
from lowmem_ft.foundation.host import mapped_files
from lowmem_ft.foundation.host.mapped_files import MappedFiles, is_in_file
from lowmem_ft.foundation.units import GIB, MIB


@pytest.fixture
def files(disk_folder):
    return MappedFiles(disk_folder)


def mapping_of(tensor):
    """The line of ``/proc/self/maps`` that a tensor's memory is in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(address, 16) for address in line.split()[0].split("-"))
        if start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= end:
            return line
    raise ValueError("not in one mapping")


def num_mapped(folder):
    return Path("/proc/self/maps").read_text().count(f"{folder}/")


def test_memory_begins_as_zeros_and_keeps_what_is_written(files):
    memory = files.allocate(5000)
    assert memory.dtype == torch.uint8
    assert memory.shape == (5000,)
    assert not memory.any()
    values = torch.randn(1250)
    memory.view(torch.float32).copy_(values)
    assert torch.equal(memory.view(torch.float32), values)


def test_what_is_written_lies_in_pages_of_a_file(files):
    memory = files.allocate(64 * MIB).fill_(1)
    _, access, *_, file, state = mapping_of(memory).split()
    assert access == "rw-s"  # shared: a private page would be a copy in RAM once it is written to
    assert file.startswith(f"{files.folder}/")
    assert state == "(deleted)"
    assert is_in_file(memory[3:].view(torch.int8))
    assert not is_in_file(torch.zeros(3))


def test_files_have_no_name_and_go_with_their_last_view(files):
    before = os.listdir(files.folder)
    view = files.allocate(10_000)[100:200]
    assert os.listdir(files.folder) == before
    assert num_mapped(files.folder) == 1
    del view
    gc.collect()
    assert num_mapped(files.folder) == 0


def test_there_may_be_more_of_them_than_a_process_may_open(files):
    opened = os.listdir("/proc/self/fd")
    kept = [files.allocate(8) for _ in range(50)]
    assert len(os.listdir("/proc/self/fd")) == len(opened)
    assert len(kept) == 50


def test_a_disk_without_room_is_refused_beforehand(files, monkeypatch):
    monkeypatch.setattr(mapped_files.shutil, "disk_usage", lambda folder: SimpleNamespace(free=3 * GIB))
    files.check(3 * GIB, "offload.optimizer=host")
    with pytest.raises(DoesNotFitError) as error:
        files.check(4 * GIB, "offload.optimizer=host")
    assert str(error.value) == (
        f"offload.optimizer=host needs 4.00 GiB more in offload.folder={files.folder}, and its disk has 3.00 GiB "
        "free. Free some space, or set offload.folder to a folder on a larger disk."
    )


def test_blocks_are_reserved_so_that_a_full_disk_is_an_error_and_no_signal_later(files, monkeypatch):
    reserved = []

    def reserve(descriptor, start, num_bytes):
        reserved.append((start, num_bytes))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped_files.os, "posix_fallocate", reserve)
    with pytest.raises(
        DoesNotFitError, match=r"has no room for another 1\.00 MiB: .*No space left.* Free some space"
    ):
        files.allocate(MIB)
    assert reserved == [(0, MIB)]


def test_a_folder_in_ram_is_refused(tmp_path, monkeypatch):
    mounts = [
        SimpleNamespace(mountpoint=place, fstype=kind)
        for place, kind in (
            ("/", "tmpfs"),
            ("/", "ext4"),
            (str(tmp_path), "tmpfs"),
            (f"{tmp_path}/disk", "xfs"),
        )
    ]
    monkeypatch.setattr(mapped_files.psutil, "disk_partitions", lambda all: mounts)
    (tmp_path / "disk").mkdir()
    MappedFiles(tmp_path / "disk")
    MappedFiles(Path.cwd())
    with pytest.raises(UserError, match=r"must be on a disk, got .* on tmpfs, which keeps its files in RAM"):
        MappedFiles(tmp_path)


@pytest.mark.parametrize(
    "folder,kind", [("/no/such/folder", "an existing folder"), ("/proc", "a writable folder")]
)
def test_a_folder_that_cannot_be_used_is_refused(folder, kind):
    with pytest.raises(UserError, match=f"offload.folder must be {kind}, got {folder}"):
        MappedFiles(Path(folder))


def test_a_system_without_nameless_files_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(mapped_files.sys, "platform", "win32")
    with pytest.raises(UserError, match=r"this is win32\. Leave offload\.folder out"):
        MappedFiles(tmp_path)
