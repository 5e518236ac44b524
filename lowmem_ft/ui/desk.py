"""The line of the page's questions: one process answers them one at a time, with progress, a limit and cancelling."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.child_process import ChildFailedError
from lowmem_ft.planning.estimator.estimating_processes import EstimatingProcess
from lowmem_ft.ui.answering import isolated

LIMIT_SECONDS = 1800.0
"""The most seconds of one answer, after which its process is ended."""

MOST_WAITING = 8
MOST_REMEMBERED = 128
PATIENCE_SECONDS = 0.2
"""Seconds that a question waits for a newer one of the same browser tab, such as the next click through a list: a
question that was dropped while it was answered costs a new process. An answer from a kept trace waits as long, too.
"""

_TICK_SECONDS = 0.2


class SupersededError(Exception):
    """A question was dropped: the same tab has asked another, or its user has cancelled it."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Work that is being done, and for how many seconds."""

    doing: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The value that a function returned."""

    value: Any


@dataclass(eq=False)
class _Ticket:
    """A question in line or being answered, and whether it was dropped."""

    number: int
    key: Any
    dropped: threading.Event = field(default_factory=threading.Event)


class Desk:
    """Takes the questions of all tabs of the page, has one answered at a time, and remembers each answer.

    Args:
        limit_seconds: see ``LIMIT_SECONDS``.
        make_process: starts the process that answers.
    """

    def __init__(
        self,
        *,
        limit_seconds: float = LIMIT_SECONDS,
        make_process: Callable[[], EstimatingProcess] = lambda: EstimatingProcess("lowmem_ft.ui.answering"),
    ) -> None:
        self._limit_seconds = limit_seconds
        self._make_process = make_process
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._tickets: dict[tuple[str, str], _Ticket] = {}
        self._numbers = itertools.count()
        self._remembered: OrderedDict[Any, Any] = OrderedDict()
        self._process: EstimatingProcess | None = None

    def ask(
        self, tab: str, kind: str, function: Callable[..., Any], *arguments: Any
    ) -> Iterator[Progress | Answer]:
        """Yield progress, then the answer; a closed iterator ends the work.

        Args:
            tab: the browser tab; its newer question of a kind drops an older one.
            kind: the part of the page that asks, such as ``estimate``.
            function: a function of ``ui/answering.py``, which takes ``on_progress`` last.
            *arguments: its arguments, hashable.

        Raises:
            UserError: if the function raised it, too many questions wait, or the answer took too long.
            SupersededError: if the question was dropped, or is being answered for the same tab already.
        """
        key = function.__name__, arguments
        with self._lock:
            if (same := self._tickets.get((tab, kind))) is not None and same.key == key:
                raise SupersededError  # the first of the two continues
            self._drop(tab, kind)
            ticket, remembered = _Ticket(next(self._numbers), key), self._remembered.get(key)
            if remembered is None:
                if len(self._tickets) >= MOST_WAITING:
                    raise UserError(
                        f"The page answers one question at a time, and at most {MOST_WAITING} may wait, got one "
                        "more. Try again when one of them is done."
                    )
                self._tickets[tab, kind] = ticket
        if remembered is not None:
            yield Answer(value=remembered)
            return
        try:
            yield from self._in_line(ticket)
            try:
                value = yield from self._answered(ticket, function, arguments)
            finally:
                self._turn.release()
        finally:
            with self._lock:
                if self._tickets.get((tab, kind)) is ticket:
                    del self._tickets[tab, kind]
        with self._lock:
            self._remembered[key] = value
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        yield Answer(value=value)

    def cancel(self, tab: str) -> None:
        """Drop all questions of a tab; the work on one of them ends at once."""
        with self._lock:
            for owner, kind in list(self._tickets):
                if owner == tab:
                    self._drop(owner, kind)

    def start(self) -> None:
        """Start the process that answers, which takes seconds to import its libraries."""
        with self._lock:
            if self._process is None:
                self._process = self._make_process()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._process is not None:
                self._process.close()
                self._process = None

    def _drop(self, tab: str, kind: str) -> None:
        if (ticket := self._tickets.pop((tab, kind), None)) is not None:
            ticket.dropped.set()

    def _in_line(self, ticket: _Ticket) -> Iterator[Progress]:
        """Wait whether a newer question comes, then for the turn, which the caller releases."""
        since = time.monotonic()
        if ticket.dropped.wait(PATIENCE_SECONDS):
            raise SupersededError
        while not self._turn.acquire(timeout=_TICK_SECONDS):
            if ticket.dropped.is_set():
                raise SupersededError
            with self._lock:
                before = sum(other.number < ticket.number for other in self._tickets.values())
            doing = f"waiting for {before} other question{'' if before == 1 else 's'}"
            yield Progress(
                doing=doing if before else "ending the previous work", seconds=time.monotonic() - since
            )

    def _answered(
        self, ticket: _Ticket, function: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> Iterator[Progress]:
        """Yield progress and return the answer; any other end of the wait ends the process, and starts another."""
        said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.start()
        process = self._process
        assert process is not None
        since, doing, is_done = time.monotonic(), "loading torch and transformers", False

        def tell(text: str) -> None:
            said.put(("doing", text))

        def wait() -> None:
            try:
                answer = process.call(isolated, function, *arguments, on_progress=tell)
                said.put(("answer", answer))
            except Exception as error:
                said.put(("error", error))

        threading.Thread(target=wait, daemon=True).start()
        try:
            while True:
                seconds = time.monotonic() - since
                if ticket.dropped.is_set():
                    raise SupersededError
                if seconds > self._limit_seconds:
                    raise UserError(
                        f"An answer on the page may take at most {self._limit_seconds:.0f} s, and this took longer. "
                        "Use the command, which has no limit."
                    )
                with contextlib.suppress(queue.Empty):
                    what, value = said.get(timeout=_TICK_SECONDS)
                    if what == "answer":
                        is_done = True
                        return value
                    if what == "error":
                        is_done = isinstance(value, UserError)
                        raise _explained(value)
                    doing = value
                yield Progress(doing=doing, seconds=seconds)
        finally:
            if not is_done:
                self.close()
                self.start()


def _explained(error: Exception) -> Exception:
    if isinstance(error, ChildFailedError):
        return UserError(
            f"The process that answers ended before it had an answer: {error}. Its sizes may be beyond this machine's "
            "memory; the command shows the whole error."
        )
    return error
