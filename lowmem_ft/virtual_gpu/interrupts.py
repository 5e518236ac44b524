"""Delay of Ctrl-C and SIGTERM until a backward pass that runs in Python is over, as they might end the process.

On a virtual device most of a backward pass is Python that C++ calls, and not all of that C++ lets an exception
through: the process would end by ``std::terminate``, without a message. So the signal waits for the end of the pass.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import torch

ASK_AGAIN_S = 0.02


@contextlib.contextmanager
def interrupts_wait_for_backward() -> Iterator[None]:
    """Run the handlers of SIGINT and SIGTERM outside of backward passes only, in a block of the main thread."""
    with _waits(signal.SIGINT), _waits(signal.SIGTERM):
        yield


@contextlib.contextmanager
def _waits(number: signal.Signals) -> Iterator[None]:
    handler = signal.getsignal(number)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def wait_or_handle(number: int, frame: FrameType | None) -> None:
        if torch._C._current_graph_task_id() == -1:
            handler(number, frame)
        else:
            again = threading.Timer(ASK_AGAIN_S, signal.raise_signal, (number,))
            again.daemon = True
            again.start()

    signal.signal(number, wait_or_handle)
    try:
        yield
    finally:
        if signal.getsignal(number) is wait_or_handle:
            signal.signal(number, handler)
