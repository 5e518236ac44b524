"""The plan by which a run's processes share one model and its data; it alone knows a strategy by its name.

Two axes lie over the ranks. The processes of a *context group* share the tokens of the same rows; other groups read
other rows. Context groups are neighbours, ``rank = data_index * context + context_index``, so that what they exchange
in each layer stays within a machine wherever ``context`` divides its processes. A *shard group* shares one copy of the
weights, across both axes: each of its processes has the gradients of other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

from lowmem_ft.foundation.knob import ENGINES, Engine

Strategy = Literal["none", "ddp", "fsdp2", "zero2", "zero3"]
"""Sharing strategies of a run's processes, by the names of torch and DeepSpeed."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """The processes of a run, and the place of one of them.

    Args:
        strategy: a :data:`Strategy`; a script may have another name, of which nothing is known. See :func:`plan_of`
            for one that is left open.
        num_processes: processes on all machines together, one per device.
        num_machines: machines, each with the same number of processes.
        context: processes that share the tokens of one row: the size of a context group.
        rank: this process, from 0.
    """

    strategy: str = "none"
    num_processes: int = 1
    num_machines: int = 1
    context: int = 1
    rank: int = 0

    @property
    def several(self) -> bool:
        """True if there is more than one process."""
        return self.num_processes > 1

    @property
    def engine(self) -> Engine | None:
        """The strategy if it is one of several processes, whatever their number; else None."""
        return next((engine for engine in ENGINES if engine == self.strategy), None)

    @property
    def copies_weights(self) -> bool:
        """True if every process holds everything, and DDP sums the gradients."""
        return self.strategy == "ddp"

    @property
    def shares_state(self) -> bool:
        """True if each process holds a part of the optimizer's state and of the gradients."""
        return self.shards_rows or self.has_engine

    @property
    def shares_weights(self) -> bool:
        """True if each process holds a part of the weights, too."""
        return self.strategy in ("fsdp2", "zero3")

    @property
    def shards_rows(self) -> bool:
        """True if torch's ``fully_shard`` cuts weights, gradients and state by rows."""
        return self.strategy == "fsdp2"

    @property
    def has_engine(self) -> bool:
        """True if DeepSpeed runs the optimizer, and sums and clips the gradients."""
        return self.strategy in ("zero2", "zero3")

    @property
    def per_machine(self) -> int:
        """Processes on each machine."""
        return max(1, self.num_processes // self.num_machines)

    @property
    def shard_group(self) -> range:
        """The ranks that share one copy of the weights with this one; itself alone if it holds all of them."""
        return range(self.num_processes) if self.shares_weights else range(self.rank, self.rank + 1)

    @property
    def replicas(self) -> int:
        """Copies of the weights in all processes together."""
        return self.num_processes // len(self.shard_group)

    @property
    def context_group(self) -> range:
        """The ranks that share each row's tokens with this one."""
        first = self.data_index * self.context
        return range(first, first + self.context)

    @property
    def context_index(self) -> int:
        """The place of this rank in its context group."""
        return self.rank % self.context

    @property
    def data_width(self) -> int:
        """Different micro-batches that are processed at a time: the number of context groups."""
        return self.num_processes // self.context

    @property
    def data_index(self) -> int:
        """The micro-batch, of those processed at a time, that this rank reads."""
        return self.rank // self.context

    @property
    def sent_share(self) -> float:
        """Share of a tensor that a rank sends when all gather it from parts, or scatter its sums."""
        return 1 - 1 / self.num_processes

    def in_all(self, each: _Number) -> _Number:
        """Return the sum over all processes of what is the same in each of them."""
        return each * self.num_processes

    def rows_at_once(self, micro_batch: int) -> int:
        """Return the different rows that are processed at a time, by their number in one micro-batch."""
        return micro_batch * self.data_width

    def per_process(self, total: float) -> float:
        """Return what each process has of a total that they share evenly."""
        return total / self.num_processes

    def cuts_evenly(self, num_rows: int) -> bool:
        """Return whether each process of the shard group holds as many of a weight's rows."""
        return num_rows % len(self.shard_group) == 0

    def problems(self) -> Iterator[str]:
        """Yield a line for each axis that does not divide the processes: the rule, the values, the way out."""
        for key, size, because in (
            ("num_machines", self.num_machines, "each machine has the same number of processes"),
            ("context", self.context, "each row's tokens are shared by that many processes"),
        ):
            if self.num_processes % size:
                yield (
                    f"distributed.num_processes={self.num_processes} must be a multiple of distributed.{key}={size}, "
                    f"because {because}. Correct one of the two."
                )


def is_of_one_process(strategy: str | None) -> bool:
    """Return whether ``distributed.strategy`` names the one of a single process, rather than leave it open."""
    return strategy == "none"


def plan_of(
    strategy: str | None, num_processes: int = 1, *, num_machines: int = 1, context: int = 1, rank: int = 0
) -> ParallelPlan:
    """Return the plan that ``distributed.strategy`` means for a number of processes.

    Args:
        strategy: its value; of several processes that name none, each holds a whole model.
        num_processes: as for :class:`ParallelPlan`.
        num_machines: likewise.
        context: likewise.
        rank: likewise.
    """
    if strategy is None or is_of_one_process(strategy):
        strategy = "ddp" if num_processes > 1 else "none"
    return ParallelPlan(
        strategy=strategy, num_processes=num_processes, num_machines=num_machines, context=context, rank=rank
    )


def machines_of(num_processes: int, per_machine: int) -> int:
    """Return the number of machines that a launcher's processes are on."""
    return max(1, num_processes // per_machine)
