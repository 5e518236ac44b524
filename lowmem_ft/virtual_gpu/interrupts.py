"""Ctrl-C or SIGTERM in a backward pass that autograd runs in Python: raised in the middle, it may end the process.

On a virtual device most of a backward pass is Python, called from C++ of which not all lets an exception through: the
process would end by ``std::terminate``, without a word. So the signal waits for the end of the pass.
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
    """Let whoever handles SIGINT and SIGTERM do so outside of backward passes, in a block of the main thread."""
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
