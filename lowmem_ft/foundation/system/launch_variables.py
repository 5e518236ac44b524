"""The environment variables by which every launcher tells a process its place among the others.

Programs import this module before they can handle a signal, so it imports only the standard library.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

LAUNCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets. Batch scripts, containers and notebooks leave some of them behind, too."""

LAST_PORT = 65535

_alone: list[None] = []
"""One entry for each block of :func:`alone` that the process is in."""


def whole_number(name: str) -> int | None:
    """Return the value of a variable; None if it is unset or not a whole number of at least 0."""
    value = os.environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() else None


def is_launched() -> bool:
    """Return whether this is one of several processes that find each other by these variables.

    Some of the variables, or values that no launcher sets, make no launch: they are left over from something else.
    """
    rank, num_processes, local_rank, port = map(
        whole_number, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    )
    if _alone or rank is None or num_processes is None or local_rank is None or port is None:
        return False
    if not os.environ.get("MASTER_ADDR"):
        return False
    return local_rank <= rank < num_processes and num_processes > 1 and port <= LAST_PORT


def is_main_process() -> bool:
    """Return whether this process speaks for all of its launch, as one without a launch always does."""
    return not is_launched() or whole_number("RANK") == 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Let the process speak for itself in a block, for a command that never is one of several."""
    _alone.append(None)
    try:
        yield
    finally:
        _alone.pop()
