"""The peak of host memory of a process with a GPU, and its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lowmem_ft.foundation.memory.category import Place
from lowmem_ft.foundation.memory.timeline import Timeline

ON_HOST: tuple[Place, ...] = ("host", "pinned")
"""Places whose tensors count as host memory."""


@dataclass(frozen=True, kw_only=True)
class HostOutside:
    """Host memory that no tensor of a trace represents.

    Args:
        process_bytes: bytes of the interpreter with its libraries, at all times.
        loading_bytes: bytes of weights in transit while the model loads.
        saving_bytes: bytes of weights in transit while files are written.
    """

    process_bytes: int = 0
    loading_bytes: int = 0
    saving_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class HostTensors:
    """Bytes of tensors on the host by category, at their peak while the model loads and at their peak from then on."""

    in_load: Mapping[str, int] = field(default_factory=dict)
    in_run: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, timeline: Timeline) -> HostTensors:
        """Return the peaks of the tensors in a trace."""
        if not any(allocation.place in ON_HOST for allocation in timeline.allocations):
            return cls()
        position = {True: -1, False: -1}
        most = {True: 0, False: 0}
        is_load = True
        for index, ((kind, allocation), live) in enumerate(
            zip(timeline.events, timeline.live_bytes(ON_HOST), strict=True)
        ):
            if kind == "malloc":
                is_load = timeline.allocations[allocation].phase == "load"
            if live > most[is_load]:
                most[is_load], position[is_load] = live, index
        return cls(
            in_load=_by_category(timeline, position[True]), in_run=_by_category(timeline, position[False])
        )

    def peak_with(self, outside: HostOutside) -> dict[str, int]:
        """Return the bytes on the host at the peak of the whole process, by part; parts without bytes are left out."""
        loading = {**self.in_load, "process": outside.process_bytes, "loading": outside.loading_bytes}
        running = {**self.in_run, "process": outside.process_bytes, "saving": outside.saving_bytes}
        peak = max(loading, running, key=lambda parts: sum(parts.values()))
        return {part: num_bytes for part, num_bytes in peak.items() if num_bytes}


def _by_category(timeline: Timeline, position: int) -> dict[str, int]:
    """Return the bytes on the host after an event, by purpose."""
    by_category: dict[str, int] = {}
    for index in timeline.alive_at(position):
        allocation = timeline.allocations[index]
        if allocation.place in ON_HOST:
            by_category[allocation.category] = by_category.get(allocation.category, 0) + allocation.size_bytes
    return by_category
