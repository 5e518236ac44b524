"""Signals that ask to stop, in one block of code: what such a signal leaves behind, or when it may take effect.

Three things can happen to a signal here, and no two of them can be one context manager:

- :func:`on_interrupt`: it ends the block at once; the words about what is left behind go with it.
- :func:`defer_signals`: it ends the block as soon as an exception can pass through the code that runs. That code does
  not handle signals, so this module calls the previous handler itself.
- :class:`Interruption`: it ends nothing. The block asks for it when it has something whole to save, which can be
  minutes later, and a second signal must not wait as long.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lowmem_ft.foundation.system import signals
from lowmem_ft.foundation.system.signals import handlers, is_ours

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 0.02


@contextlib.contextmanager
def on_interrupt(leaves: str, *, in_native_code: bool = False) -> Iterator[None]:
    """Add what is left behind to a ``KeyboardInterrupt`` of the block, unless it has a text already.

    Args:
        leaves: continues "Stopped by SIGINT", and ends in a full stop.
        in_native_code: whether the block waits in C++, in which Python calls no signal handler. A thread ends the
            process there, without an exception; a handler that is neither lowmem_ft's nor Python's own stays.
    """
    try:
        with _process_ended_at_once(leaves) if in_native_code else contextlib.nullcontext():
            yield
    except KeyboardInterrupt as stop:
        stop.args = stop.args or (leaves,)
        raise


@contextlib.contextmanager
def _process_ended_at_once(leaves: str) -> Iterator[None]:
    replaced: set[int] = set()
    reader, writer = socket.socketpair()
    ending = threading.Lock()

    def end(number: int, frame: FrameType | None = None) -> None:
        if ending.acquire(blocking=False):  # by the thread or, once that hears nothing, by the handler
            signals.end_at_once(number, frame, leaves)

    def new(number: int, before: Any) -> Any:
        if not is_ours(before) and before is not signal.default_int_handler:
            return None
        replaced.add(number)
        return end

    def listen() -> None:
        while came := reader.recv(1):
            if came[0] in replaced:
                end(came[0])

    with reader, writer, handlers(new):
        if not replaced:
            yield
            return
        writer.setblocking(False)
        descriptor_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        thread = threading.Thread(target=listen, name="lowmem_ft signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor_before)
            writer.close()
            thread.join()


@contextlib.contextmanager
def defer_signals(is_busy: Callable[[], bool] = lambda: False) -> Iterator[Callable[[], None]]:
    """Call the handlers of signals only where an exception can pass, and lose none that they raise.

    Python drops an exception in a finalizer, and a trace runs thousands of those.

    Args:
        is_busy: whether the main thread runs code now through which no exception may pass.

    Yields:
        A function that raises the ``KeyboardInterrupt`` of a signal in this block, if it was lost.
    """
    raised: list[int] = []

    def new(number: int, before: Any) -> Any:
        def wait_or_handle(number: int, frame: FrameType | None) -> None:
            if is_busy():
                again = threading.Timer(_RETRY_SECONDS, signal.raise_signal, (number,))
                again.daemon = True
                again.start()
                return
            try:
                before(number, frame)
            except KeyboardInterrupt:
                raised.append(number)
                raise

        return wait_or_handle if callable(before) else None

    def raise_if_lost() -> None:
        if raised:
            raise KeyboardInterrupt

    with handlers(new):
        yield raise_if_lost


class Interruption(contextlib.ExitStack):
    """Context that records a signal that asks to stop instead of ending the process; a later second signal ends it.

    Python allows signal handlers only in the main thread; elsewhere (a notebook's worker, a test) this does nothing.

    Attributes:
        signal_number: number of the signal; 0: none has come.
    """

    def __init__(self) -> None:
        super().__init__()
        self.signal_number = 0
        self._first_seconds = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        self.enter_context(handlers(self._new))
        return self

    def _new(self, number: int, before: Any) -> Callable[[int, FrameType | None], Any]:
        self._before[number] = before or signal.SIG_DFL
        return self._remember

    def _remember(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self.signal_number:
            self.signal_number, self._first_seconds = number, now
            logger.warning(
                "%s received: saving at the end of this step, then stopping. Send it again to stop at once.",
                signal.Signals(number).name,
            )
        elif now - self._first_seconds > signals.ONE_REQUEST_SECONDS:
            for each, before in self._before.items():  # also if other code calls this handler from its own
                signal.signal(each, before)
            signal.raise_signal(number)
