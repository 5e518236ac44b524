"""Processes of one run end together: what one fails of is told to the others, and none waits for one that is gone.

A process that fails writes why into the store that all have met in, before it goes. The others find its connections
closed in their next exchange (gloo says so at once), or are waiting for it in one that never ends (NCCL): a thread of
each looks into the store every second, and ends a process that does not end by itself.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed

from lowmem_ft.foundation.errors import Interrupted, OtherProcessError, UserError

LOOK_EVERY_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""What a process gets to end by itself, once another has failed."""

_TOLD_WITHIN_SECONDS = 0.3
"""Whoever fails tells it before its connections close; only those who find another gone may come a little later."""

_runs = itertools.count()  # each process has as many as the others

GONE = (
    "Another process is gone without a word: it was killed (SIGKILL, or the kernel for want of host memory; the "
    "launcher says the signal), or its machine or the network went down. Go on from the last whole checkpoint with "
    "training.resume_from_checkpoint=auto."
)


def meeting_store() -> Any:
    """What the processes of this run have met in, a key-value store; None: there is one process, or they have not."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.distributed_c10d._get_default_store()


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
    """Around a run: an error in one of its processes ends it in all of them.

    Raises:
        OtherProcessError: if this process could not go on because another one has failed, or is gone.
    """
    key = f"lowmem_ft failed {next(_runs)}"
    watch = _Watch(key)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        watch.start()
    try:
        yield
    except Interrupted:
        raise  # all are, together
    except BaseException as error:
        store = meeting_store()
        if store is None:
            raise
        if not _comes_of_exchange(error):
            _tell(store, key, _words_of(error))
            raise
        raise OtherProcessError(_reason(store, key)) from error
    finally:
        watch.stop()


def _comes_of_exchange(error: BaseException | None) -> bool:
    """Whether it began with processes that could not reach each other; a launcher's SIGTERM comes on top of that."""
    while error is not None:
        of_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
        if of_gloo or isinstance(error, torch.distributed.DistError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(store: Any, key: str) -> str:
    """What the process said that has failed first; that it said nothing, is said to the others."""
    try:
        told = _told(store, key)
    except KeyboardInterrupt:
        told = _told(store, key)  # a launcher ends all others at once
    if told is None:
        _tell(store, key, GONE)
    return told or GONE


def _words_of(error: BaseException) -> str:
    what = " ".join(error.problems) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return f"Process {torch.distributed.get_rank()} has failed, and the others end with it. {what}"


def _tell(store: Any, key: str, words: str) -> None:
    """The first who has something to say is heard."""
    with contextlib.suppress(RuntimeError):  # the store is gone with the process that had it
        store.compare_set(key, "", json.dumps(words))


def _told(store: Any, key: str) -> str | None:
    """What another process has failed of; None if it did not say."""
    deadline = time.monotonic() + _TOLD_WITHIN_SECONDS
    with contextlib.suppress(RuntimeError):
        while True:
            if store.check([key]):
                return json.loads(store.get(key))
            if time.monotonic() > deadline:
                break
            time.sleep(_TOLD_WITHIN_SECONDS / 10)
    return None


class _Watch(threading.Thread):
    """Ends this process if it does not end by itself, after another one has failed.

    Args:
        key: in the store, of what has failed.
    """

    def __init__(self, key: str) -> None:
        super().__init__(name="lowmem_ft ending together", daemon=True)
        self._key = key
        self._stopped = threading.Event()

    def stop(self) -> None:
        """The run is over, or ending."""
        self._stopped.set()

    def run(self) -> None:
        store = None
        while not self._stopped.wait(LOOK_EVERY_SECONDS):
            try:
                # One of its own: the main thread may be waiting in the other.
                store = store or _clone(meeting_store())
                told = store is not None and store.check([self._key])
            except RuntimeError:
                return  # the store is gone with the process that had it, and so are the connections
            if told and not self._stopped.wait(GRACE_SECONDS):
                sys.stderr.write(f"error: {_told(store, self._key)}\n")
                sys.stderr.flush()
                os._exit(OtherProcessError.exit_code)


def _clone(store: Any) -> Any:
    return None if store is None else store.clone()
