"""Owners of weights and state that visit memory which several modules use in turn.

A layer's turn is told by the modules of its allocations: without this a model is traced whole, slowly, not wrongly.
"""

from __future__ import annotations

from lowmem_ft.foundation.memory.timeline import Allocation


class Tenants:
    """Modules by the index of an allocation: the module of the data that was copied into it last.

    What a step makes from that data belongs to that module, as if it had been made from the module's own.
    """

    def __init__(self) -> None:
        self._module: dict[int, str] = {}
        self._shared: set[int] = set()

    def share(self, index: int) -> None:
        """Mark memory as used in turn: it is no single module's, whichever parameters it holds."""
        self._shared.add(index)

    def is_shared(self, index: int) -> bool:
        """Return whether several modules use the memory in turn."""
        return index in self._shared

    def of(self, index: int) -> str:
        """Return the module whose data the memory holds; empty if it holds no module's."""
        return self._module.get(index, "")

    def move_in(self, index: int, memory: Allocation, guest: Allocation) -> None:
        """Note a copy of weights to memory for weights, or of an optimizer's state to memory without a module."""
        if memory.category == guest.category == "parameter" or (
            guest.category == "optimizer_state" and not memory.module
        ):
            self._module[index] = guest.module
