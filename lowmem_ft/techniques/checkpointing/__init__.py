"""Decoder layers that keep only their input between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
    from lowmem_ft.techniques.checkpointing.recomputed_activation import enable_recomputed_activations

__all__ = ["enable_checkpointing", "enable_recomputed_activations"]

__getattr__ = lazy_exports(__name__)
