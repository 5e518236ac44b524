"""Speculative estimates: other processes make those that a search will probably ask for next.

They only bring forward what the search would do anyway: with any number of processes it takes the same decisions in the
same order, on the same numbers. A guess that the search does not ask for is wasted.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.child_process import ChildFailedError
from lowmem_ft.foundation.system.host_limits import tightest_host_limit
from lowmem_ft.foundation.units import GIB
from lowmem_ft.planning.estimator.estimating_processes import (
    PROCESSES_VARIABLE,
    EstimatingProcess,
    processes_at_once,
)
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.planner.plan_target import Target
from lowmem_ft.planning.planner.search.estimated_needs import Need
from lowmem_ft.recipe import Recipe

logger = logging.getLogger(__name__)

MOST_PROCESSES = 4
"""Processes in all, with this one; the further ahead a guess, the less likely the search asks for it."""

PROCESS_BYTES = 2 * GIB
"""Bytes of memory that must be free for each process."""


Asked = tuple[Recipe, Sequence[str]]
"""A recipe to estimate, and the numbers of last layers of which it takes as many as fit."""


class EstimatesAhead:
    """Other processes that estimate; each starts with its first guess, and all end with :meth:`close`.

    Args:
        num_processes: processes in addition to this one; with 0 nothing is guessed.
        target: the device, the memory limits and the model.
    """

    def __init__(self, num_processes: int, target: Target) -> None:
        self._num_processes = num_processes
        # Rules are functions of this process, and traces are kept on disk.
        self._target = dataclasses.replace(target, rules=(), kept=KeptTraces())
        self._threads = ThreadPoolExecutor(max(1, num_processes), thread_name_prefix="estimate-ahead")
        self._processes: list[EstimatingProcess] = []
        self._latest: dict[int, Future[Need]] = {}
        """Latest estimate that each process was asked for, by its number."""
        self._guessed: dict[int, Future[Need]] = {}

    def guess(self, places: Iterable[int], asked_of: Callable[[int], Asked]) -> None:
        """Begin estimates on as many processes as are idle.

        Args:
            places: indices that the search may ask for, the likeliest first.
            asked_of: returns the recipe of an index, and of which numbers of layers it takes as many as fit.
        """
        numbers = range(self._num_processes)
        idle = [number for number in numbers if number not in self._latest or self._latest[number].done()]
        new = (place for place in places if place not in self._guessed)
        try:
            for number, place in zip(idle, new, strict=False):  # looks for no place without a process
                asked = asked_of(place)
                if number == len(self._processes):
                    self._processes.append(EstimatingProcess())
                call = self._processes[number].call
                estimate = self._threads.submit(call, _estimate_there, self._target, *asked)
                self._guessed[place] = self._latest[number] = estimate
        except ChildFailedError as error:
            self._guess_no_more(error)

    def take(self, place: int) -> Need | None:
        """Return an estimate that was guessed right, waiting for it if it is under way; None if it was not guessed.

        Also returns None if the other process refused it: it lacks model types registered in this program alone.
        """
        future = self._guessed.pop(place, None)
        if future is None:
            return None
        try:
            return future.result()
        except ChildFailedError as error:
            self._guess_no_more(error)
            return None
        except UserError:
            return None

    def close(self) -> None:
        """End all processes, whatever is under way."""
        for process in self._processes:
            process.close()
        self._threads.shutdown(cancel_futures=True)

    def _guess_no_more(self, error: ChildFailedError) -> None:
        logger.info("No more estimates ahead: %s.", error)
        self._num_processes = 0


def num_processes_ahead() -> int:
    """Return the number of processes, in addition to this one, that this machine has cores and memory for.

    Raises:
        UserError: if ``LOWMEM_FT_TRACE_PROCESSES`` is not a number.
    """
    room = tightest_host_limit(None).available_bytes // PROCESS_BYTES
    return min(MOST_PROCESSES - 1, processes_at_once() - 1, room)


@functools.cache
def _kept() -> KeptTraces:
    os.environ[PROCESSES_VARIABLE] = "1"  # there are enough processes already
    return KeptTraces.of_user()


def _estimate_there(target: Target, recipe: Recipe, counted: Sequence[str]) -> Need:
    return target.need(recipe, counted, _kept())
