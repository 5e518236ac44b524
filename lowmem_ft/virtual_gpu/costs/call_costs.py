"""Costs of operator calls, looked up once for all equal calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.flop_counter import flop_registry

from lowmem_ft.virtual_gpu.calls.fake_results import SeenCall
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.costs.operator_work import work_of

WorkspaceRule = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[int, ...]]
"""Function from operator, arguments, keyword arguments and result to sizes in bytes of the kernel's own buffers.

The kernel takes them after those of its result.
"""
Workspaces = Callable[[Any, int], Iterator[tuple[object, int]]]
"""Function from operator and stream to the buffers, each a key and a size, that a library keeps from then on."""


@dataclass(slots=True)
class CallCost:
    """Device memory and work of a call.

    Args:
        workspaces: the bytes of its kernel's own buffers.
        has_library: whether it calls a library that keeps buffers.
        work: its work, without a position yet; None if it has no work.
    """

    workspaces: tuple[int, ...]
    has_library: bool
    work: Work | None


class CallCosts:
    """Costs of calls on one device.

    Args:
        device_type: type of the device.
        rule: buffers of kernels; None for devices without such rules.
        libraries: buffers of libraries; None likewise.
    """

    def __init__(
        self, device_type: str, rule: WorkspaceRule | None = None, libraries: Workspaces | None = None
    ) -> None:
        self._device_type = device_type
        self._rule = rule
        self._libraries = libraries
        self._costs: dict[SeenCall, CallCost] = {}
        self._num_formulas = 0
        self._held: set[object] = set()

    def of(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        seen: SeenCall | None,
        stream: int,
    ) -> CallCost:
        """Return an operator's work and the buffers it takes in addition to its results, which equal calls share."""
        if len(flop_registry) != self._num_formulas:  # a program may register a formula at any time
            self._num_formulas = len(flop_registry)
            self._costs.clear()
        cost = self._costs.get(seen) if seen is not None else None
        if cost is None:
            workspaces = () if self._rule is None else self._rule(func, args, kwargs, result)
            work = work_of(func, args, kwargs, result, device_type=self._device_type)
            has_library = self._libraries is not None and any(self._libraries(func, stream))
            cost = CallCost(workspaces, has_library, work)
            if seen is not None:
                self._costs[seen] = cost
        return cost

    def first_taken(self, func: Any, stream: int) -> Iterator[int]:
        """Yield the sizes of the buffers that a library takes with this call and keeps."""
        if self._libraries is None:
            return
        for key, size in self._libraries(func, stream):
            if key not in self._held:
                yield size
                self._held.add(key)  # unless there was no memory for it
