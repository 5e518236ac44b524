"""Host memory for a device's tensors, of exactly the requested size: pinned for faster copies, or in files."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import mmap
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lowmem_ft.foundation.devices import is_virtual, kernels_of
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.host.copy_engine import reserve_staging_buffers
from lowmem_ft.foundation.memory.category import Category
from lowmem_ft.foundation.system.host_limits import tightest_host_limit
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.wsl import is_wsl

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Pinned memory comes in whole pages: two registrations must not share one."""

IN_FILES: tuple[Category, ...] = ("parameter", "optimizer_state", "gradient")
"""Categories that go to files if there are any: large pieces that are idle until a layer's or a chunk's next use."""


class Files(Protocol):
    """Memory in files of a folder, such as :class:`~lowmem_ft.foundation.host.mapped_files.MappedFiles`."""

    @property
    def folder(self) -> Path:
        """The folder of the files."""
        ...

    def check(self, num_bytes: int, purpose: str) -> None:
        """Refuse an amount for which the disk has no room."""
        ...

    def allocate(self, num_bytes: int) -> Tensor:
        """Return zeros in a file, as bytes."""
        ...


class HostMemory:
    """Hands out zeroed host tensors, each checked against the memory that the host has left before it is made.

    For a CUDA device they are pinned: pages of their own, registered with the driver. torch's own pinned memory rounds
    each request up to a power of two (1.67 to 1.92 times the request) and is not given back. If the driver refuses to
    pin, memory is pageable from then on, which is logged; :class:`~lowmem_ft.foundation.host.copy_engine.CopyEngine`
    takes either. On a CPU they are plain tensors. With ``files`` all of :data:`IN_FILES` is pageable and in files.

    A tensor's memory is freed with its last view. Copies in flight keep no reference: end them first.

    Args:
        device: the device whose tensors will be stored here.
        is_limited: whether this machine's memory is the limit; false for traces of another machine.
        budget_bytes: bytes that the whole process may hold on the host; None: all there is.
        files: hold :data:`IN_FILES` instead of RAM; None: nothing is in files.
        on_allocation: called with each tensor and its category, for example to record a trace.

    Attributes:
        is_pinned: whether the next tensor in RAM will be pinned.
        bytes_by_category: bytes allocated now, in RAM and in files, by category.
        file_bytes: the part of them in files: resident only while the kernel has no other use for the pages.
        peak_file_bytes: the highest ``file_bytes`` so far.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        is_limited: bool = True,
        budget_bytes: int | None = None,
        files: Files | None = None,
        on_allocation: Callable[[Tensor, Category], None] = lambda tensor, category: None,
    ) -> None:
        self.device = device
        self.is_pinned = kernels_of(device) == "cuda"
        self.bytes_by_category: dict[Category, int] = {}
        self.file_bytes = self.peak_file_bytes = 0
        self._files = files
        self._is_limited = is_limited
        self._budget_bytes = budget_bytes
        self._on_allocation = on_allocation
        self._has_reserved = False

    def files_for(self, category: Category) -> Files | None:
        """Return the files that hold tensors of a category; None: they are in RAM."""
        return self._files if category in IN_FILES else None

    def place_of(self, category: Category) -> str:
        """Return the place of a category's tensors in words."""
        files = self.files_for(category)
        if files is not None:
            return f"files in {files.folder}"
        return f"{'pinned' if self.is_pinned else 'pageable'} host memory"

    def check(self, num_bytes: int, purpose: str, way_out: str, category: Category = "temporary") -> None:
        """Refuse an amount that will not fit, before any of it is allocated.

        Args:
            num_bytes: bytes that will be requested in total.
            purpose: what they are for, by recipe key, such as ``offload.optimizer=host``.
            way_out: what to do instead if RAM is short, as a sentence.
            category: what they are for, which decides where they will be stored.

        Raises:
            DoesNotFitError: if the machine, its container, the budget or the disk has less left.
            DoesNotFitError: if the machine, its container, the budget or the disk has less left.
        """
        if not self._is_limited:
            return
        files = self.files_for(category)
        if files is not None:
            files.check(num_bytes, purpose)
            return
        limit = tightest_host_limit(self._budget_bytes, file_bytes=self.file_bytes)
        if num_bytes > limit.available_bytes:
            raise DoesNotFitError(
                f"{purpose} needs {format_bytes(num_bytes)} more host memory, and {limit.source}, of which "
                f"{format_bytes(max(0, limit.available_bytes))} can be used. {way_out}"
            )

    def allocate(
        self, shape: int | Sequence[int], dtype: torch.dtype, category: Category = "temporary"
    ) -> Tensor:
        """Return zeros on the host; their pages are touched at once, so that a later check sees them.

        Args:
            shape: shape of the tensor, or the number of its elements.
            dtype: type of its elements.
            category: what it is for.

        Returns:
            A contiguous tensor with a storage of its own.

        Raises:
            DoesNotFitError: if the host, or the disk, does not have that much left.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = math.prod(sizes) * dtype.itemsize
        self.check(
            num_bytes,
            f"A host tensor ({category})",
            "Raise budget.host, or keep more on the device (offload.*).",
            category,
        )
        files = self.files_for(category)
        if files is not None and num_bytes:
            tensor = files.allocate(num_bytes).view(dtype).view(sizes)
            self._count(tensor, category, in_file=True)
            return tensor
        pages = self._pinned(num_bytes) if self.is_pinned and num_bytes else None
        is_pageable = pages is None
        tensor = (
            torch.empty(sizes, dtype=dtype, device="cpu")
            if is_pageable
            else pages[:num_bytes].view(dtype).view(sizes)
        )
        self._count(tensor, category, in_file=False)
        return tensor.zero_()

    def _pinned(self, num_bytes: int) -> Tensor | None:
        """Return pinned bytes in whole pages; None if the driver refuses, now or earlier."""
        num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if is_virtual(self.device):
            pages = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
            registration = torch.get_device_module(self.device).register_host_memory(pages)
            _unregister_in_time(pages, registration.synchronize, registration.unregister)
            return pages
        if is_wsl() and not self._has_reserved:
            # The driver pins little there, and refuses once that is used up: reserve the buffers of all copies first.
            self._has_reserved = True
            reserve_staging_buffers()
        pages = _own_pages(num_bytes)
        error = _register(pages, self.device)
        if error is None:
            return pages
        self.is_pinned = False
        logger.warning(
            "From now on host memory is pageable, and copies are staged through a small pinned buffer, because the "
            "driver refused to pin %s: %s. Copies take about twice as long.",
            format_bytes(num_bytes),
            error,
        )
        return None

    def _count(self, tensor: Tensor, category: Category, *, in_file: bool) -> None:
        self._on_allocation(tensor, category)
        storage = tensor.untyped_storage()
        self._add(category, storage.nbytes(), in_file)
        gone = weakref.finalize(storage, _subtract, weakref.ref(self), category, storage.nbytes(), in_file)
        gone.atexit = False

    def _add(self, category: Category, num_bytes: int, in_file: bool) -> None:
        self.bytes_by_category[category] = self.bytes_by_category.get(category, 0) + num_bytes
        if in_file:
            self.file_bytes += num_bytes
            self.peak_file_bytes = max(self.peak_file_bytes, self.file_bytes)


def _subtract(memory: weakref.ref[HostMemory], category: Category, num_bytes: int, in_file: bool) -> None:
    """Subtract a freed storage. A trace's recorder leads from memory to tensors: neither may keep the other alive."""
    alive = memory()
    if alive is not None:
        alive._add(category, -num_bytes, in_file)


def _own_pages(num_bytes: int) -> Tensor:
    """Return bytes in pages that nothing else shares, which ``malloc`` does not promise."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Huge pages are registered faster. After a fork, copy on write would move pages away from under the device.
        if hasattr(mmap, advice):
            pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


def _register(pages: Tensor, device: torch.device) -> str | None:
    """Pin pages until their storage is freed; return why not, if the driver refuses."""
    module = torch.get_device_module(device)
    runtime = module.cudart()
    pages.zero_()  # with all threads; the driver would touch page after page in one
    pointer = pages.data_ptr()
    result = runtime.cudaHostRegister(pointer, pages.nbytes, 0)
    if int(result) != 0:
        _clear_last_error(device)
        return runtime.cudaGetErrorString(result)
    synchronize = functools.partial(module.synchronize, device)
    _unregister_in_time(pages, synchronize, functools.partial(runtime.cudaHostUnregister, pointer))
    return None


def _unregister_in_time(
    pages: Tensor, synchronize: Callable[[], None], unregister: Callable[[], object]
) -> None:
    """Unregister pages right before they go back to the system."""
    weakref.finalize(pages.untyped_storage(), _unregister, synchronize, unregister).atexit = False


def _unregister(synchronize: Callable[[], None], unregister: Callable[[], object]) -> None:
    synchronize()  # no copy may be in flight
    unregister()


def _clear_last_error(device: torch.device) -> None:
    """Launch a kernel that takes the blame: a failed call stays CUDA's last error until a kernel reports it."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
