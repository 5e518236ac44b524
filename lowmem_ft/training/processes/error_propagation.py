"""Propagation of one rank's error to all ranks, so that none hangs.

Before it exits, a failing process writes the reason into the rendezvous store. The others find its connections closed
in their next collective (gloo reports that at once), or hang in one that never ends (NCCL): a thread in each process
polls the store every second, and ends the process if it does not end by itself.

A process that ends because of an error leaves its group without the others, some of which may be dead. Destroying a
group of NCCL's would wait for them: its ``shutdown`` finalizes communicators, which is an agreement of all ranks.
Aborting it is not. Torch has its abort for this (``_abort_process_group``, which does nothing to gloo's), and whatever
still hangs then is ended with the process.
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
from lowmem_ft.foundation.system.launch_variables import whole_number

LOOK_EVERY_SECONDS = 1.0
GRACE_SECONDS = 5.0
"""Seconds that a process has to end by itself, once another has failed."""

_TOLD_WITHIN_SECONDS = 0.3
"""Seconds to wait for a reason in the store. A process that fails writes it before its connections close; only one that
finds another gone may write a little later."""

_runs = itertools.count()  # counts the same in every process

_exit_codes: list[int] = []
"""The code with which this process exits, once a run of several processes has failed in it; until the next one."""

_GONE = (
    "Another process has disappeared without a message: it was killed (SIGKILL, or by the kernel for lack of host "
    "memory; the launcher shows the signal), or its machine or the network went down. Resume from the last complete "
    "checkpoint with {}."
)


def meeting_store() -> Any:
    """Return the key-value store of this run's rendezvous; None for a single process, or before the rendezvous."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.distributed_c10d._get_default_store()


@contextlib.contextmanager
def ending_together(resumed_by: str = "training.resume_from_checkpoint=auto") -> Iterator[None]:
    """Run a block in which an error in one process ends all of them.

    Args:
        resumed_by: what resumes the block's run, for its users.

    Raises:
        OtherProcessError: if this process could not continue because another one has failed or disappeared.
    """
    _exit_codes.clear()
    key = f"lowmem_ft failed {next(_runs)}"
    watch = _Watch(key)
    if (whole_number("WORLD_SIZE") or 1) > 1:
        watch.start()
    try:
        yield
    except Interrupted:
        raise  # all processes are, together
    except BaseException as error:
        store = meeting_store()
        if store is None:
            raise
        _exit_codes.append(getattr(error, "exit_code", OtherProcessError.exit_code))
        if not _comes_of_exchange(error):
            _tell(store, key, _words_of(error))
            raise
        raise OtherProcessError(_reason(store, key, _GONE.format(resumed_by))) from error
    finally:
        watch.stop()


def leave_processes() -> None:
    """Destroy the process group if there is one; after a failed run abort it, and wait at most a grace for its end."""
    if not torch.distributed.is_initialized():
        return
    if not _exit_codes:
        torch.distributed.destroy_process_group()
        return
    sys.stdout.flush()
    sys.stderr.flush()
    end = threading.Timer(GRACE_SECONDS, os._exit, _exit_codes)
    end.daemon = True
    end.start()
    if "nccl" in torch.distributed.get_backend_config():
        torch.distributed.distributed_c10d._abort_process_group()
    else:
        torch.distributed.destroy_process_group()
    end.cancel()


def _comes_of_exchange(error: BaseException | None) -> bool:
    """Return whether an error's chain has a failed collective; a launcher's SIGTERM may come on top of that."""
    while error is not None:
        of_gloo = isinstance(error, RuntimeError) and "/gloo/" in str(error)
        if of_gloo or isinstance(error, torch.distributed.DistError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _reason(store: Any, key: str, gone: str) -> str:
    """Return the reason that the first failing process wrote; if it wrote none, write ``gone`` for the others."""
    try:
        told = _told(store, key)
    except KeyboardInterrupt:
        told = _told(store, key)  # a launcher signals all other processes at once
    if told is None:
        _tell(store, key, gone)
    return told or gone


def _words_of(error: BaseException) -> str:
    what = " ".join(error.problems) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    return f"Process {torch.distributed.get_rank()} has failed, so the others end too. {what}"


def _tell(store: Any, key: str, words: str) -> None:
    """Write a reason into the store, unless another process has written one before."""
    with contextlib.suppress(RuntimeError):  # the store is gone with the process that had it
        store.compare_set(key, "", json.dumps(words))


def _told(store: Any, key: str) -> str | None:
    """Return the reason that another process wrote; None if it wrote none."""
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
    """Thread that ends this process if it does not end by itself after another one has failed.

    Args:
        key: the store's key for the reason.
    """

    def __init__(self, key: str) -> None:
        super().__init__(name="lowmem_ft ending together", daemon=True)
        self._key = key
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Stop the thread, as the run is over or ending."""
        self._stopped.set()

    def run(self) -> None:
        store = None
        while not self._stopped.wait(LOOK_EVERY_SECONDS):
            try:
                # A separate connection: the main thread may be blocked in the other.
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
