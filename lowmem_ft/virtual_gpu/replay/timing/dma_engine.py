"""One direction of the host link, which the copies of several streams share."""

from __future__ import annotations

from bisect import bisect_right


class DmaEngine:
    """Carries what is ready, and of that what was issued first; a copy that still waits for an event holds nobody up.

    Streams have queues of their own on NVIDIA's GPUs, and the engine is taken to turn to those that can go on; this has
    not been held against a GPU. A large copy that one issued before it overtakes goes on when that is through.
    """

    def __init__(self) -> None:
        # When it is free: from each of these moments until the one beside it.
        self._starts = [0.0]
        self._stops = [float("inf")]

    def carry(self, ready: float, seconds: float) -> tuple[float, float]:
        """Give a copy the first free times from a moment on.

        Args:
            ready: when it may begin.
            seconds: that it takes in all.

        Returns:
            When it begins, and when it is done.
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
        """Let go of what was free before a moment, before which no copy will be ready any more."""
        if self._stops[0] <= moment:  # rarely
            num_over = bisect_right(self._stops, moment)
            del self._starts[:num_over], self._stops[:num_over]

    def _take(self, index: int, start: float, stop: float) -> int:
        """Use a part of a free time; the number of the next one."""
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
