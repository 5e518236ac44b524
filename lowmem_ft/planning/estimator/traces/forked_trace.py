"""A trace made in a forked process while this one makes another, where an estimate may need both.

It forks only where that is cheap and safe: on Linux, with a core to spare, in a process that does not drive a CUDA
device, and for its first trace: once a backward pass has run on a device, virtual or not, torch lets no fork run
another. If the other process gives no trace, for whatever reason, this process makes it.

It is no ``foundation/system/child_process.py``: that imports torch and transformers for seconds, and would have to be
sent what is here already, as far as it can be pickled. As a daemon of ``multiprocessing`` it ends with its parent.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import torch

from lowmem_ft.planning.estimator.estimating_processes import processes_at_once
from lowmem_ft.planning.estimator.traces.traced_recipe import TracedRecipe

logger = logging.getLogger(__name__)

PATIENCE_S = 60.0
"""Seconds to wait for the forked process after this one has its trace; it is then taken for stuck."""

_is_first = True

Take = Callable[[], TracedRecipe | None]
"""A function that waits for a trace, and returns it or None."""


@contextlib.contextmanager
def forked_trace(make: Callable[[], TracedRecipe]) -> Iterator[Take]:
    """Make a trace in a separate process for as long as a ``with`` block lasts.

    Args:
        make: makes the trace, on a copy of this process's memory, so that its changes are not visible here.

    Yields:
        A function that waits for the trace; it returns None where there is no such process, or it failed.
    """
    global _is_first
    started = _start(make) if _is_first and _may_fork() else None
    _is_first = False
    if started is None:
        yield lambda: None
        return
    process, connection = started
    try:
        yield lambda: _received(connection)
    finally:
        process.kill()
        process.join()
        connection.close()


def _may_fork() -> bool:
    if sys.platform != "linux" or processes_at_once() == 1:
        return False
    is_child = multiprocessing.current_process().daemon  # and a daemon may have no children
    return not is_child and not torch.cuda.is_initialized()


def _start(make: Callable[[], TracedRecipe]) -> tuple[BaseProcess, Connection] | None:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(make, receiver, sender), daemon=True)
    try:
        with warnings.catch_warnings():
            # Python warns of forks in processes with threads, one of which may hold a lock: the wait is limited for
            # that case.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
    except OSError as error:
        logger.info("No process could be started for another trace: %s.", error)
        receiver.close()
        return None
    finally:
        sender.close()
    return process, receiver


def _serve(make: Callable[[], TracedRecipe], receiver: Connection, sender: Connection) -> None:
    receiver.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it too, and ends this process
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the parent's threads do not exist here
    with contextlib.suppress(Exception):  # the parent will run into the same error
        sender.send_bytes(pickle.dumps(make(), pickle.HIGHEST_PROTOCOL))


def _received(connection: Connection) -> TracedRecipe | None:
    try:
        if connection.poll(PATIENCE_S):
            return pickle.loads(connection.recv_bytes())
        logger.info("The process for another trace gave no answer in %.0f s.", PATIENCE_S)
    except EOFError:
        logger.info("The process for another trace ended without a result.")
    return None
