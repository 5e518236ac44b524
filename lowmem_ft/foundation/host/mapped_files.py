"""Memory in files of a folder: as large as the disk, and as fast; the kernel keeps in RAM what it has room for."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import sys
import tempfile
from pathlib import Path

import psutil
import torch
from torch import Tensor

from lowmem_ft.foundation.errors import DoesNotFitError, UserError
from lowmem_ft.foundation.units import format_bytes

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
"""File systems that store their files in RAM."""


class MappedFiles:
    """Hands out memory backed by files, one file per allocation.

    No file has a name: each disappears with its memory, however the process ends. Its blocks are reserved beforehand,
    since a full disk would otherwise show only when a page is written back, and kill the process (SIGBUS).

    Args:
        folder: a folder on a disk with room.

    Raises:
        UserError: if the folder does not exist, cannot be written to, or keeps its files in RAM.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _refuse_unusable(folder)

    def check(self, num_bytes: int, purpose: str) -> None:
        """Refuse an amount for which the disk has no room.

        Args:
            num_bytes: bytes that will be requested in total.
            purpose: what they are for, by recipe key.

        Raises:
            DoesNotFitError: if less is free.
        """
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            raise DoesNotFitError(
                f"{purpose} needs {format_bytes(num_bytes)} more in offload.folder={self.folder}, and its disk has "
                f"{format_bytes(free)} free. Free some space, or set offload.folder to a folder on a larger disk."
            )

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeros in a file of their own.

        Args:
            num_bytes: at least 1.

        Returns:
            Bytes; writes to them reach the disk when the kernel needs their pages for something else.

        Raises:
            DoesNotFitError: if the disk refuses.
        """
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                # Unlike Python's own mmap, torch keeps no descriptor: a model may have more tensors than open files.
                path = f"/proc/self/fd/{file.fileno()}"
                return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise DoesNotFitError(
                f"offload.folder={self.folder} has no room for another {format_bytes(num_bytes)}: {error}. Free some "
                "space, or set offload.folder to a folder on another disk."
            ) from error


def is_in_file(tensor: Tensor) -> bool:
    """Return whether a tensor's memory is a file's."""
    return tensor.untyped_storage().filename is not None


def forget_pages(tensor: Tensor) -> None:
    """Drop the pages of a file that a tensor holds in memory; a later access reads them again.

    Args:
        tensor: contiguous, and a part of a mapped file that no one has written to: other memory would be zeroed.
    """
    if sys.platform != "linux" or not tensor.numel():
        return
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    start -= start % mmap.PAGESIZE
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)


def _refuse_unusable(folder: Path) -> None:
    if sys.platform != "linux":
        raise UserError(
            f"offload.folder={folder} needs unnamed memory-mapped files, which only Linux has; this is "
            f"{sys.platform}. Leave offload.folder out."
        )
    if not folder.is_dir():
        raise UserError(
            f"offload.folder must be an existing folder, got {folder}. Create it, on a fast local disk."
        )
    kind = _file_system_of(folder)
    if kind in _IN_MEMORY:
        raise UserError(
            f"offload.folder must be on a disk, got {folder} on {kind}, which keeps its files in RAM. Set it to a "
            "folder on a fast local disk, or leave it out."
        )
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"offload.folder must be a writable folder, got {folder}: {error}. Set it to another one."
        ) from error


def _file_system_of(folder: Path) -> str:
    """Return the type of a folder's file system; if a mount point has two, the upper one counts."""
    resolved = folder.resolve()
    mounts = [
        (len(Path(mount.mountpoint).parts), index, mount.fstype)
        for index, mount in enumerate(psutil.disk_partitions(all=True))
        if resolved.is_relative_to(mount.mountpoint)
    ]
    return max(mounts, default=(0, 0, ""))[2]
