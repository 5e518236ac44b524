"""The processes of a run: what they tell each other, and how they fail together."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import torch

from lowmem_ft.foundation.errors import UserError, user_error
from lowmem_ft.training.distributed.rendezvous import RankInfo, refusals


class Processes:
    """A single process; runtimes of several override what has to cross from one to another.

    Attributes:
        num_processes: all processes that train one model.
        num_processes_here: those of them on this machine.
        process_index: the rank of this one.
    """

    num_processes: int = 1
    num_processes_here: int = 1
    process_index: int = 0

    @property
    def is_main(self) -> bool:
        """True in the main process, rank 0, which writes every file that is written once."""
        return self.process_index == 0

    def sum_over_processes(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all processes, element by element."""
        return value

    def max_over_processes(self, value: int) -> int:
        """Return the largest of the processes' values; of flags, whether any is set."""
        return value

    def gather(self, value: list[Any]) -> list[Any]:
        """Return the concatenated lists of all processes."""
        return value

    def wait_for_everyone(self) -> None:
        """Wait until all processes have called this: a barrier."""

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise one process's user error in all processes, so that none waits for a lost one.

        Raises:
            UserError: this process's own error, or that of another.
        """
        own: UserError | None = None
        try:
            yield
        except UserError as error:
            own = error
        if self.max_over_processes(own is not None):
            problems = () if own is None else own.problems
            said = list(refusals(self.gather([RankInfo(socket.gethostname(), problems)])))
            raise user_error(UserError if own is None else type(own), tuple(said)) from own
