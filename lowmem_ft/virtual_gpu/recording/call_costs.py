"""What calls of operators cost: looked up once for all that are alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.flop_counter import flop_registry

from lowmem_ft.virtual_gpu.kernels.operator_work import work_of
from lowmem_ft.virtual_gpu.recording.fake_results import SeenCall
from lowmem_ft.virtual_gpu.recording.work import Work

WorkspaceRule = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], tuple[int, ...]]
"""Operator, arguments, keyword arguments and result to the sizes of the buffers its kernel takes for itself, after
those of its result."""
Workspaces = Callable[[Any, int], Iterator[tuple[object, int]]]
"""Operator and stream to the buffers that a library keeps from its first call on: a key and a size each."""


@dataclass(slots=True)
class CallCost:
    """What a call takes on the device.

    Args:
        workspaces: the bytes of its kernel's own buffers.
        has_library: whether it calls a library that keeps buffers.
        work: its work, at no place yet; None: none.
    """

    workspaces: tuple[int, ...]
    has_library: bool
    work: Work | None


class CallCosts:
    """Costs of calls on one device.

    Args:
        device_type: the device.
        rule: buffers of kernels; None for devices without such rules.
        libraries: buffers of libraries; None as well.
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
        """What an operator takes beside its results, and its work, which alike calls have in common."""
        if len(flop_registry) != self._num_formulas:  # a program may register one at any time
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
        """The sizes of the buffers that a library takes with this call and keeps."""
        if self._libraries is None:
            return
        for key, size in self._libraries(func, stream):
            if key not in self._held:
                self._held.add(key)
                yield size
