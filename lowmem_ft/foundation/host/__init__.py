"""Host memory next to a device: pinned memory, mapped files, asynchronous copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.foundation.host.pinned_memory import HostMemory

__all__ = ["HostMemory"]

__getattr__ = lazy_exports(__name__)
