"""The start of a script: alone, or as one of several processes with the variables that a launcher sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.foundation.parallel_plan import ParallelPlan
from lowmem_ft.virtual_gpu.costs.one_process import Peers


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One process of a launch on one machine.

    Args:
        num_processes: processes, one for each GPU.
        process_index: the rank of this one.
        launcher: the command that starts them; empty: Python alone, which sets no variables.
        further: variables that the launcher sets in addition to torchrun's.
        sets_ranks: whether it sets torchrun's.
    """

    num_processes: int = 1
    process_index: int = 0
    launcher: str = ""
    further: Mapping[str, str] = field(default_factory=dict)
    sets_ranks: bool = True

    @property
    def plan(self) -> ParallelPlan:
        """The processes and this one's place; the script alone knows by which strategy they share its model."""
        return ParallelPlan(num_processes=self.num_processes, rank=self.process_index)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that the script is started with."""
        if not (self.launcher and self.sets_ranks):
            return dict(self.further)
        return {
            **self.further,
            "RANK": f"{self.process_index}",
            "LOCAL_RANK": f"{self.process_index}",
            "WORLD_SIZE": f"{self.num_processes}",
            "LOCAL_WORLD_SIZE": f"{self.num_processes}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }

    def in_words(self) -> str:
        """Return a note on how the script is started; nothing if Python starts it."""
        if not self.launcher:
            return ""
        if self.num_processes == 1:
            reads = ", whose variables it reads" if not self.further else ""
            return f"launcher: as {self.launcher} starts it{reads}"
        return f"launcher: one of {self.num_processes} processes, as {self.launcher} starts them"

    def last(self) -> Launch:
        """Return the last process of the same launch."""
        return dataclasses.replace(self, process_index=self.num_processes - 1)

    def peers(self, sent: Sequence[Any] = ()) -> Peers:
        """Return its ranks.

        Args:
            sent: objects that the first rank has sent, for another.
        """
        return Peers(self.num_processes, self.process_index, sent)


ALONE = Launch()


def by_torchrun(num_processes: int = 1) -> Launch:
    """Return the first process that torchrun starts on one machine."""
    return Launch(num_processes=num_processes, launcher=f"torchrun --nproc_per_node={num_processes}")
