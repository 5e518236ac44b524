"""Optimizers by name, and their state as plain named tensors."""

from lowmem_ft.optimizers.config import OptimizerConfig
from lowmem_ft.optimizers.create import create_optimizer, parameter_groups
from lowmem_ft.optimizers.state import OptimizerState, export_optimizer_state, import_optimizer_state
from lowmem_ft.optimizers.table import OPTIMIZERS, check_optimizer

__all__ = [
    "OPTIMIZERS",
    "OptimizerConfig",
    "OptimizerState",
    "check_optimizer",
    "create_optimizer",
    "export_optimizer_state",
    "import_optimizer_state",
    "parameter_groups",
]
