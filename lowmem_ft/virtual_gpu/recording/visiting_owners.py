"""The modules that own the current contents of shared buffers, such as the slots of streamed weights.

Extrapolation recognises a layer by the modules of its allocations. Without these owners it would not recognise layers
that share buffers, and the whole model would be traced: slower, with the same result.
"""

from __future__ import annotations

from lowmem_ft.foundation.memory.timeline import Allocation


class Tenants:
    """For each shared allocation, the module whose data was copied into it last.

    Results that a step computes from that data are attributed to that module.
    """

    def __init__(self) -> None:
        self._module: dict[int, str] = {}
        self._shared: set[int] = set()

    def share(self, index: int) -> None:
        """Mark memory as shared: it belongs to no single module, whichever parameters it holds."""
        self._shared.add(index)

    def is_shared(self, index: int) -> bool:
        """Return whether several modules share the memory."""
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
