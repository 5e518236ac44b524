"""Host memory in which a device's tensors wait: as large as asked for, and pinned where that makes copies faster."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowmem_ft.devices import is_virtual, kernels_of
from lowmem_ft.errors import DoesNotFitError
from lowmem_ft.memory.category import Category
from lowmem_ft.memory.host_limits import tightest_host_limit
from lowmem_ft.units import format_bytes

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Pinned memory comes in whole pages: two registrations must not share one."""


class HostMemory:
    """Hands out zeroed host tensors, each checked against what the host has left before it is made.

    For a CUDA device they are pinned: pages of their own that the driver is told of. torch's own pinned memory rounds
    each request up to a power of two (1.67 to 1.92 times what was asked for) and is not given back. Where the driver
    refuses to pin, memory is pageable from then on, which is logged; :class:`~lowmem_ft.memory.host_copies.CopyEngine`
    takes either. On a CPU they are plain tensors.

    A tensor's memory goes with its last view. Copies in flight keep no reference: end them first.

    Args:
        device: which device's tensors will wait here.
        is_limited: whether this machine's memory is what counts; false for traces of another machine.
        budget_bytes: what the whole process may hold on the host, resident; None: all there is.

    Attributes:
        is_pinned: whether the next tensor will be pinned.
        bytes_by_category: what is allocated now, by what it was asked for.
    """

    def __init__(
        self, device: torch.device, *, is_limited: bool = True, budget_bytes: int | None = None
    ) -> None:
        self.device = device
        self.is_pinned = kernels_of(device) == "cuda"
        self.bytes_by_category: dict[Category, int] = {}
        self._is_limited = is_limited
        self._budget_bytes = budget_bytes

    def check(self, num_bytes: int, purpose: str, way_out: str) -> None:
        """Refuse what will not fit, before any of it is allocated.

        Args:
            num_bytes: what will be asked for in all.
            purpose: what for, by recipe key, such as ``offload.optimizer=host``.
            way_out: what to do instead, as a sentence.

        Raises:
            DoesNotFitError: if the machine, its container or the budget has less left.
        """
        if not self._is_limited:
            return
        limit = tightest_host_limit(self._budget_bytes)
        if num_bytes > limit.available_bytes:
            raise DoesNotFitError(
                f"{purpose} needs {format_bytes(num_bytes)} more host memory, and {limit.source}, of which "
                f"{format_bytes(max(0, limit.available_bytes))} can be used. {way_out}"
            )

    def allocate(
        self, shape: int | Sequence[int], dtype: torch.dtype, category: Category = "temporary"
    ) -> Tensor:
        """Zeros on the host, resident at once, so that a later check sees them.

        Args:
            shape: of the tensor, or the number of its elements.
            dtype: its type.
            category: what it is for.

        Returns:
            A contiguous tensor with a storage of its own.

        Raises:
            DoesNotFitError: if the host has no such memory left.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        num_bytes = math.prod(sizes) * dtype.itemsize
        self.check(
            num_bytes,
            f"A host tensor ({category})",
            "Raise budget.host, or leave more on the device (offload.*).",
        )
        pages = self._pinned(num_bytes) if self.is_pinned and num_bytes else None
        is_pageable = pages is None
        tensor = torch.empty(sizes, dtype=dtype) if is_pageable else pages[:num_bytes].view(dtype).view(sizes)
        self._count(tensor, category)
        return tensor.zero_()

    def _pinned(self, num_bytes: int) -> Tensor | None:
        """Pinned bytes in whole pages; None where the driver refuses, and from then on."""
        num_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        if is_virtual(self.device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)  # its recorder rounds nothing
        pages = _own_pages(num_bytes)
        error = _register(pages, self.device)
        if error is None:
            return pages
        self.is_pinned = False
        logger.warning(
            "Host memory is pageable from here on, and copies are staged through a small pinned buffer, because the "
            "driver refused to pin %s: %s. Copies take about twice as long.",
            format_bytes(num_bytes),
            error,
        )
        return None

    def _count(self, tensor: Tensor, category: Category) -> None:
        storage = tensor.untyped_storage()
        self._add(category, storage.nbytes())
        weakref.finalize(storage, self._add, category, -storage.nbytes()).atexit = False

    def _add(self, category: Category, num_bytes: int) -> None:
        self.bytes_by_category[category] = self.bytes_by_category.get(category, 0) + num_bytes


def _own_pages(num_bytes: int) -> Tensor:
    """Bytes in pages that belong to nobody else, as ``malloc`` does not promise."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
        return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        # Huge pages are registered faster. After a fork, copy on write would move pages away from under the device.
        if hasattr(mmap, advice):
            pages.madvise(getattr(mmap, advice))
    return torch.frombuffer(pages, dtype=torch.uint8)


def _register(pages: Tensor, device: torch.device) -> str | None:
    """Pin pages until their storage goes; why not, if the driver refuses."""
    module = torch.get_device_module(device)
    runtime = module.cudart()
    pages.zero_()  # by all threads; the driver would touch page after page in one
    pointer = pages.data_ptr()
    result = runtime.cudaHostRegister(pointer, pages.nbytes, 0)
    if int(result) != 0:
        _clear_last_error(device)
        return runtime.cudaGetErrorString(result)
    weakref.finalize(pages.untyped_storage(), _unregister, pointer, device, module).atexit = False
    return None


def _unregister(pointer: int, device: torch.device, module: Any) -> None:
    """Called right before a storage's pages go back to the system."""
    module.synchronize(device)  # no copy may be on its way
    module.cudart().cudaHostUnregister(pointer)


def _clear_last_error(device: torch.device) -> None:
    """A call that failed stays CUDA's last error, and the next kernel would be blamed for it: this one is."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
