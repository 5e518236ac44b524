"""The keys of what several processes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowmem_ft.foundation.knob import Effect, Engine, knob
from lowmem_ft.foundation.memory.least_memory import (
    NOTHING,
    Held,
    StepFacts,
    as_it_is,
    gone_unless,
    on_host_at,
)
from lowmem_ft.foundation.parallel_plan import ParallelPlan, Strategy, is_of_one_process, plan_of

MOST_PROCESSES = 9999
"""The largest number of processes that ``--gpu 9999xNAME`` accepts."""


def _share_of_rank(held: Held, strategy: str | None, step: StepFacts) -> Held:
    return held.scaled(1 / len(step.plan.shard_group))


def _gathered(held: Held, reshards: bool | None, step: StepFacts) -> Held:
    return held if step.plan.shards_rows and reshards is False else NOTHING


@dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """State shared among several processes, each with its own device; by Accelerate's names."""

    strategy: Strategy | None = knob(
        None,
        "none: one process; ddp: every process holds everything; fsdp2: weights, gradients and optimizer state are "
        "sharded by rows among the processes (torch's fully_shard); zero2, zero3: DeepSpeed shards gradients and "
        "state, and in zero3 weights; null: as launched.",
        frees=(
            "fsdp2, zero3: each of N processes holds 1/N of weights, gradients and state; zero2: also all weights"
        ),
        costs="each layer's weights cross the link before its forward and its backward, its gradients after",
        effects={
            "ddp": Effect(cost="time"),
            "fsdp2": Effect(cost="time", traits=("layers fetched ahead",)),
            "zero2": Effect(cost="time"),
            "zero3": Effect(cost="time"),
        },
        search_values=("ddp", "fsdp2"),
        remaining_bytes={
            **dict.fromkeys(
                ("layers", "outer", "rest", "state", "gradients", "sums", "saved"), _share_of_rank
            ),
            "gathered": as_it_is,
        },
    )
    num_processes: int | None = knob(
        None, "Number of processes on all machines together, one per device; null: as launched."
    )
    num_machines: int = knob(1, "Number of machines, each with the same number of processes.")
    reshard_after_forward: bool | None = knob(
        None,
        "For fsdp2: free a layer's gathered weights after its forward pass, and gather them again for its backward "
        "pass; null: as launched, else true.",
        frees="true: all weights except for one or two layers between forward and backward",
        costs="true: the weights cross the link once more",
        effects={True: Effect(cost="time"), None: Effect(cost="time")},
        search_values=(False, None),
        remaining_bytes={"gathered": _gathered},
    )
    cpu_offload: bool | None = knob(
        None,
        "For fsdp2 and zero3: keep this process's part of weights, gradients and state on the host, whose processor "
        "computes the updates; for zero2: the same except for the weights; null: as launched, else false.",
        frees="true: each process's part of weights, gradients and state on its device",
        costs="true: the part crosses PCIe for each gathering, and the host's processor computes the updates",
        effects={True: Effect(cost="host link")},
        remaining_bytes={
            **dict.fromkeys(("layers", "outer", "rest"), on_host_at(True, crosses=True)),
            **dict.fromkeys(("state", "gradients", "sums"), on_host_at(True)),
            "saved": gone_unless(None, False),
        },
    )
    sync_each_batch: bool = knob(
        True,
        "For fsdp2: shard the gradients of each micro-batch among the processes; false: only after the last one, so "
        "that each process keeps a whole sum until then.",
        frees="true: 4 bytes a parameter while several micro-batches are summed",
        costs="true: gradients cross the link once a micro-batch instead of once a step",
        effects={True: Effect(cost="time")},
        remaining_bytes={"sums": as_it_is},
    )

    def plan(self, num_processes: int | None = None, rank: int = 0) -> ParallelPlan:
        """Return the plan of the processes.

        Args:
            num_processes: as launched; None: as these keys say, and one if they leave it open.
            rank: this process.
        """
        return plan_of(
            self.strategy,
            num_processes or self.num_processes or 1,
            num_machines=self.num_machines,
            rank=rank,
        )

    @property
    def named_engine(self) -> Engine | None:
        """The engine that ``strategy`` names; None if it is left open, or of one process."""
        return plan_of(self.strategy).engine

    @property
    def per_machine(self) -> int:
        """Processes on each machine; 1 if nothing says how many there are."""
        return self.plan().per_machine

    @property
    def reshards(self) -> bool:
        """True if gathered weights are freed after forward."""
        return self.reshard_after_forward is not False

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        yield from self._problems_of_numbers()
        for name, other, strategies in (
            ("reshard_after_forward", False, ("fsdp2",)),
            ("cpu_offload", True, ("fsdp2", "zero2", "zero3")),
            ("sync_each_batch", False, ("fsdp2",)),
        ):
            if getattr(self, name) == other and self.strategy not in (None, *strategies):
                yield (
                    f"distributed.{name}={str(other).lower()} is for distributed.strategy={' or '.join(strategies)}, "
                    f"got {self.strategy}. Set distributed.strategy=fsdp2, or leave distributed.{name} out."
                )

    def _problems_of_numbers(self) -> Iterator[str]:
        processes, machines = self.num_processes, self.num_machines
        if processes is not None and processes < 1:
            yield (
                f"distributed.num_processes must be at least 1, got {processes}. Set it to the number of devices."
            )
        elif processes is not None and processes > MOST_PROCESSES:
            yield (
                f"distributed.num_processes is at most {MOST_PROCESSES}, got {processes}. Set it to the number of "
                "devices."
            )
        if machines < 1:
            yield f"distributed.num_machines must be at least 1, got {machines}. Set it to 1."
        elif processes is not None and processes >= 1:
            yield from self.plan().problems()
        if processes is not None and processes > 1 and is_of_one_process(self.strategy):
            yield (
                f"distributed.strategy=none is one process, got distributed.num_processes={processes}. Set "
                "distributed.strategy=fsdp2 or ddp, or distributed.num_processes=1."
            )
        if processes == 1 and self.named_engine is not None:
            yield (
                f"distributed.strategy={self.strategy} is for several processes, got distributed.num_processes=1. "
                "Set distributed.strategy=none, or more processes."
            )


ONE_PROCESS = DistributedConfig(strategy="none", num_processes=1)
