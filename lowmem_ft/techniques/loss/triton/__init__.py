"""Cross entropy of a chunk's logits as one Triton kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:  # the kernel's file needs Triton
    from lowmem_ft.techniques.loss.triton.triton_kernel import BLOCK, OPTIONS, cross_entropy_row  # noqa: F401

__getattr__ = lazy_exports(__name__)
