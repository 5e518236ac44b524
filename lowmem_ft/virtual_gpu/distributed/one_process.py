"""One rank without the others: what it sends goes nowhere, and nothing waits for it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch.distributed
from torch.distributed import HashStore

from lowmem_ft.foundation.errors import UserError


@contextlib.contextmanager
def one_of_several(num_processes: int, process_index: int) -> Iterator[None]:
    """Let ``torch.distributed`` treat this process as one of several ranks in a block.

    Args:
        num_processes: the number of ranks; with 1, nothing is done.
        process_index: the rank of this process.

    Raises:
        UserError: if this process is in a process group already.
    """
    if num_processes == 1:
        yield
        return
    if torch.distributed.is_initialized():
        raise UserError(
            f"A trace of one of {num_processes} processes simulates a process group, but this process is already in "
            "one. Estimate before torch.distributed.init_process_group, or in a process that was not launched with "
            "others."
        )
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend

    excepthook = sys.excepthook  # torch's own puts the rank before every later error
    torch.distributed.init_process_group(
        "fake", rank=process_index, world_size=num_processes, store=HashStore()
    )
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
        sys.excepthook = excepthook
