"""Optimizers by name, and their state as plain named tensors.

Names resolve on first use, so that reading a recipe (which needs only ``OptimizerConfig``) does not import torch.
"""

from typing import TYPE_CHECKING

from lowmem_ft.foundation.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lowmem_ft.optimizers.chunked.chunked_optimizer import ChunkedOptimizer
    from lowmem_ft.optimizers.chunked.named_state import (
        OptimizerState,
        export_optimizer_state,
        import_optimizer_state,
    )
    from lowmem_ft.optimizers.config import OptimizerConfig
    from lowmem_ft.optimizers.create import (
        check_optimizer,
        create_optimizer,
        create_torch_adamw,
        may_lose_updates,
        parameter_groups,
    )
    from lowmem_ft.optimizers.state.state_parts import StateParts
    from lowmem_ft.optimizers.state.state_storage import DeviceStorage, StateStorage
    from lowmem_ft.optimizers.table import OPTIMIZERS

__all__ = [
    "OPTIMIZERS",
    "ChunkedOptimizer",
    "DeviceStorage",
    "OptimizerConfig",
    "OptimizerState",
    "StateParts",
    "StateStorage",
    "check_optimizer",
    "create_optimizer",
    "create_torch_adamw",
    "export_optimizer_state",
    "import_optimizer_state",
    "may_lose_updates",
    "parameter_groups",
]

__getattr__ = lazy_exports(__name__)
