"""Decoder layers that keep only their input between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing

__all__ = ["enable_checkpointing"]

__getattr__ = lazy_exports(__name__)
