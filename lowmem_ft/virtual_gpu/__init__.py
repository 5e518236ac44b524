"""A GPU that any PyTorch training function can run on, on a machine that has none.

A library of its own: it does not depend on recipes, techniques, optimizers or our training step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.foundation.tensors.operator_costs import register_operator_cost
    from lowmem_ft.virtual_gpu.gpu import VirtualGPU

__all__ = ["VirtualGPU", "register_operator_cost"]

# An optimizer that registers what its operators cost need not load the tracer.
__getattr__ = lazy_exports(__name__)
