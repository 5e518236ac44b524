"""One direction of the host link, which the copies of several streams share."""

from __future__ import annotations

from bisect import bisect_right


class DmaEngine:
    """Carries copies that are ready, the first issued first; a copy that still waits for an event delays no other.

    Streams have queues of their own on NVIDIA's GPUs, and the engine is assumed to serve those that can continue; this
    has not been checked against a GPU. A large copy resumes when a copy issued earlier, which overtakes it, is done.
    """

    def __init__(self) -> None:
        # Free times: from each of these moments until the one with the same index in the other list.
        self._starts = [0.0]
        self._stops = [float("inf")]

    def carry(self, ready: float, seconds: float) -> tuple[float, float]:
        """Give a copy the first free times from a moment on.

        Args:
            ready: the moment from which it may begin.
            seconds: seconds that it takes in all.

        Returns:
            The moments at which it begins and at which it is done.
        """
        index = bisect_right(self._stops, ready)
        start = at = max(ready, self._starts[index])
        while at + seconds > self._stops[index]:
            seconds -= self._stops[index] - at
            index = self._take(index, at, self._stops[index])
            at = self._starts[index]
        self._take(index, at, at + seconds)
        return start, at + seconds

    def forget(self, moment: float) -> None:
        """Forget free times before a moment, as no later copy will be ready before it."""
        if self._stops[0] <= moment:  # rarely
            num_over = bisect_right(self._stops, moment)
            del self._starts[:num_over], self._stops[:num_over]

    def _take(self, index: int, start: float, stop: float) -> int:
        """Use a part of a free time, and return the index of the next one."""
        is_rest_before, is_rest_behind = self._starts[index] < start, stop < self._stops[index]
        if is_rest_before and is_rest_behind:
            self._starts.insert(index + 1, stop)
            self._stops.insert(index, start)
        elif is_rest_before:
            self._stops[index] = start
        elif is_rest_behind:
            self._starts[index] = stop
        else:
            del self._starts[index], self._stops[index]
        return index + is_rest_before + is_rest_behind
