"""The host that a run is rehearsed for, independent of what this machine's host holds."""

from __future__ import annotations

from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.foundation.system.process_size import HOST_BYTES_WITH_CUDA
from lowmem_ft.training.step.budget_cap import Host
from lowmem_ft.virtual_gpu.replay.host_peak import ON_HOST


class RehearsedHost(Host):
    """A host for ``budget_cap.py`` that holds a process's libraries and the host allocations of the trace.

    Weights in transit while files are read and written are not in a trace; the estimate adds them
    (``planning/estimator/run_host_memory.py``).

    Args:
        timeline: the timeline of the tracing machine.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._seen = 0
        self._alive: dict[int, int] = {}
        self._live_bytes = self._most_bytes = 0

    def held_bytes(self) -> int:
        """Return the bytes held now, without page cache of files."""
        self._catch_up()
        return HOST_BYTES_WITH_CUDA + self._live_bytes

    def peak_bytes(self, file_bytes: int) -> int:
        """Return the most bytes held, without page cache: the trace has files on the disk."""
        self._catch_up()
        return HOST_BYTES_WITH_CUDA + self._most_bytes

    def limit(self, file_bytes: int) -> None:
        """Return None: neither the machine's memory nor its other load is known."""

    def _catch_up(self) -> None:
        events, allocations = self._timeline.events, self._timeline.allocations
        for kind, index in events[self._seen :]:
            if kind == "free":
                self._live_bytes -= self._alive.pop(index, 0)
            elif kind == "malloc" and allocations[index].place in ON_HOST:
                self._alive[index] = allocations[index].size_bytes
                self._live_bytes += allocations[index].size_bytes
            self._most_bytes = max(self._most_bytes, self._live_bytes)
        self._seen = len(events)
