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

    def carry(self, ready: float, seconds: float, now: float = 0.0) -> tuple[float, float]:
        """Give a copy the first free times from a moment on.

        Args:
            ready: the moment from which it may begin.
            seconds: seconds that it takes in all.
            now: a moment before which this copy and later ones are not ready; free times before it are forgotten.

        Returns:
            The moments at which it begins and at which it is done.
        """
        starts, stops = self._starts, self._stops
        if stops[0] <= now:  # rarely
            num_over = bisect_right(stops, now)
            del starts[:num_over], stops[:num_over]
        index = bisect_right(stops, ready)
        start = at = starts[index]
        if at < ready:
            start = at = ready
        stop = stops[index]
        while at + seconds > stop:
            seconds -= stop - at
            if starts[index] < at:
                stops[index] = at
                index += 1
            else:
                del starts[index], stops[index]
            at, stop = starts[index], stops[index]
        end = at + seconds
        if starts[index] < at:  # some of this free time is left before the copy
            if end < stop:
                starts.insert(index + 1, end)
                stops.insert(index, at)
            else:
                stops[index] = at
        elif end < stop:
            starts[index] = end
        else:
            del starts[index], stops[index]
        return start, end
