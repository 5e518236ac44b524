"""Rollback of a window: restores the random generators and model buffers that its forward pass has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowmem_ft.training.step.random_state import export_random_state, import_random_state

_COPIED_BYTES = 64 * 1024
"""Maximum bytes of a buffer whose values are copied: the frequencies of rotary embeddings have a few hundred. A model
whose rows do not couple writes to no larger buffer, and a copy of each layer's mask would not be cheap."""


@dataclass(frozen=True)
class _ModuleBefore:
    """Snapshot of a module with buffers; rotary embeddings that adapt to the longest row also keep plain attributes."""

    module: nn.Module
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    values: dict[str, Tensor]

    @staticmethod
    def of(module: nn.Module) -> _ModuleBefore:
        buffers = dict(module._buffers)
        values = {
            name: buffer.detach().clone()
            for name, buffer in buffers.items()
            if buffer is not None and buffer.nbytes <= _COPIED_BYTES
        }
        return _ModuleBefore(module, dict(vars(module)), buffers, values)

    @torch.no_grad()
    def restore(self) -> None:
        own = vars(self.module)
        for name in own.keys() - self.attributes.keys():
            del own[name]
        own.update(self.attributes)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        for name, values in self.values.items():
            buffer = self.buffers[name]
            assert buffer is not None, "there are values of it"
            buffer.copy_(values)


@dataclass(frozen=True)
class StepRollback:
    """Snapshot taken before a window with :meth:`of`; :meth:`restore` returns to it, so that the window can restart."""

    random_state: dict[str, Any]
    modules: tuple[_ModuleBefore, ...]
    device: torch.device

    @staticmethod
    def of(model: nn.Module, device: torch.device) -> StepRollback:
        """Take a snapshot of the present state."""
        with_buffers = (module for module in model.modules() if module._buffers)
        modules = tuple(map(_ModuleBefore.of, with_buffers))
        return StepRollback(export_random_state(device), modules, device)

    def restore(self) -> None:
        """Restore the state of the snapshot."""
        for module in self.modules:
            module.restore()
        import_random_state(self.random_state, self.device)
