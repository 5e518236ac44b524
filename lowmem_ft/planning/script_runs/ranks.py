"""The ranks of a script: by which strategy they share its model, and whether the last one has less than the first."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from lowmem_ft.planning.script_runs.launch import Launch

LOADED_BY_FIRST = "FSDP_CPU_RAM_EFFICIENT_LOADING"
"""Variable of Accelerate's, by which the first rank alone reads the weights, and sends them to the others."""


class RankWatch:
    """Sees how a script shares its model among ranks.

    Args:
        launch: how the script is started.
        say: called with a note for users.

    Attributes:
        strategy: ``fsdp2``, ``fsdp`` (its first version), ``ddp``, or ``none`` where each rank has a model of its own.
        is_uneven: whether the last rank has fewer rows of some weight than the first, or less on its host.
    """

    def __init__(self, launch: Launch, say: Callable[[str], None]) -> None:
        self._launch = launch
        self._say = say
        self._is_sharded = False
        self.strategy = "none"
        self.is_uneven = False

    def apply(self, undo: contextlib.ExitStack) -> None:
        """Watch the code that runs from now on until the stack is undone."""
        if self._launch.num_processes > 1:
            undo.callback(register_module_forward_pre_hook(self._before_forward).remove)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._is_sharded:
            return
        self._is_sharded = isinstance(module, (FSDPModule, FullyShardedDataParallel))
        if isinstance(module, FSDPModule):
            self.strategy = "fsdp2"
            self.is_uneven = _is_cut_unevenly(module) or os.environ.get(LOADED_BY_FIRST) == "true"
        elif isinstance(module, FullyShardedDataParallel):
            self.strategy = "fsdp"
            self._say("FSDP: its first version is traced, which no real run has been compared with yet")
        elif isinstance(module, DistributedDataParallel):
            self.strategy = "ddp"


def _is_cut_unevenly(model: nn.Module) -> bool:
    """Return whether the last rank's part of some weight is smaller; its parts are still whole, as none is gathered."""
    return any(
        weight.shape[placement.dim] % weight.device_mesh.size(axis)
        for weight in model.parameters()
        if isinstance(weight, DTensor)
        for axis, placement in enumerate(weight.placements)
        if isinstance(placement, Shard)
    )
