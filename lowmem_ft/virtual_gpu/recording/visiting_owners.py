"""Whose weights and state visit memory that several modules use in turn."""

from __future__ import annotations

from lowmem_ft.memory.timeline import Allocation


class Tenants:
    """By the index of an allocation, the module of what was copied into it last.

    What a step makes from it belongs to that module, as if it had been made from the module's own.
    """

    def __init__(self) -> None:
        self._module: dict[int, str] = {}
        self._shared: set[int] = set()

    def share(self, index: int) -> None:
        """Memory is used in turn: whoever's parameters lie in it, it is no module's own."""
        self._shared.add(index)

    def is_shared(self, index: int) -> bool:
        """Whether it is."""
        return index in self._shared

    def of(self, index: int) -> str:
        """The module of its tenant; empty if there is none."""
        return self._module.get(index, "")

    def move_in(self, index: int, memory: Allocation, guest: Allocation) -> None:
        """Weights that are copied to where weights go, or an optimizer's state to where nobody lives."""
        if memory.category == guest.category == "parameter" or (
            guest.category == "optimizer_state" and not memory.module
        ):
            self._module[index] = guest.module
