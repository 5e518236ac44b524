"""Memory that grows from step to step of a program that should hold as much after each, and its holders."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.garbage_collector import collector_paused
from lowmem_ft.foundation.tensors.live_tensors import live_tensors, storage_key
from lowmem_ft.monitoring.holders import holder_in_garbage, holder_of
from lowmem_ft.monitoring.leak_report import Growth, Kind, LeakReport
from lowmem_ft.monitoring.storage_origins import Birth, BirthTracker

if TYPE_CHECKING:
    from typing_extensions import Self

_MOST_HOLDERS = 10
"""Number of growths whose holders are searched, the largest first."""

_MOST_NODES = 200_000
"""Largest count of an autograd graph's nodes: a graph larger than this is large enough to be the leak."""


class _Group(NamedTuple):
    """Storages that are alike except for their shape, which may differ from batch to batch."""

    site: str
    dtype: str
    device: str


@dataclass(frozen=True)
class _Moment:
    """The live storages at the end of a step."""

    alive: dict[_Group, dict[int, Birth]]
    garbage: dict[_Group, dict[int, Birth]]
    allocated_bytes: int
    reserved_bytes: int


class LeakFinder:
    """Watches the steps of your own loop; :func:`find_leaks` does the same for a function.

    ::

        with LeakFinder(steps=3) as finder:
            for batch in batches:
                step(batch)
                finder.step_ended()  # or from a callback of another library's trainer
        print(finder.report.table())

    Compares steps by the storages alive at the end of each, grouped by the line that made them. Make the steps alike:
    the same batch, or batches of one shape. Caches and optimizer states of the first steps do not count.

    Cost: each operator passes through a dispatch mode, and each storage's place is recorded: docs/monitoring.md says
    how many times longer a step takes, until the block ends. Until there is a report, Python's collector runs only at
    the end of a step.

    Limits: memory that no operator of torch makes and no Python object shows, as in libraries of kernels, is not seen.
    A search for holders takes a second or more, as it walks over all objects of the process.

    Args:
        steps: number of steps to compare, at least two.
        warmup: number of steps before that, at least one.

    Raises:
        UserError: if there are too few of either.
    """

    def __init__(self, *, steps: int = 3, warmup: int = 1) -> None:
        if steps < 2 or warmup < 1:
            raise UserError(
                f"Finding a leak takes at least two steps after one warm-up step, got steps={steps} and "
                f"warmup={warmup}. Leave them out for 3 and 1."
            )
        self._steps = steps
        self._warmup = warmup
        self._tracker = BirthTracker()
        self._moments: list[_Moment] = []
        self._most_nodes_before = 0
        self._report: LeakReport | None = None
        self._running = contextlib.ExitStack()
        self._collector = contextlib.ExitStack()

    def __enter__(self) -> Self:
        gc.collect()
        self._tracker.add_what_python_knows()
        self._most_nodes_before = _most_nodes(0)
        with contextlib.ExitStack() as running:
            self._collector = running.enter_context(contextlib.ExitStack())
            self._collector.enter_context(collector_paused())
            if gc.get_freeze_count() == 0:
                gc.freeze()  # existing objects need no search at the end of each step
                self._collector.callback(gc.unfreeze)
            running.enter_context(self._tracker)
            self._running = running.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._running.__exit__(*exception)

    def step_ended(self) -> None:
        """Compare at this point; does nothing once there have been enough steps."""
        if self._report is not None:
            return
        self._tracker.step += 1
        num_ended = self._tracker.step - self._warmup
        if num_ended < 0:
            return
        is_last = num_ended == self._steps
        holders = self._holders_in_garbage() if is_last else {}
        self._moments.append(self._look())
        if num_ended == 0:
            self._most_nodes_before = _most_nodes(self._most_nodes_before)
        if is_last:
            self._collector.close()  # the loop may run on for long
            self._report = self._reported(holders)

    @property
    def report(self) -> LeakReport:
        """The findings.

        Raises:
            UserError: if there have been too few steps.
        """
        if self._report is None:
            raise UserError(
                f"Leaks are found once {self._warmup + self._steps} steps have ended ({self._warmup} to warm up), got "
                f"{self._tracker.step}. Call step_ended() after each, or ask for fewer."
            )
        return self._report

    @collector_paused()
    def _reported(self, holders: dict[_Group, str]) -> LeakReport:
        growths, new = self._grown()
        growths = sorted([*growths, *self._cycles(holders)], key=lambda growth: -growth.bytes_per_step)
        return LeakReport(self._steps, tuple(self._with_holders(growths, new)), self._fragmentation())

    def _look(self) -> _Moment:
        self._tracker.add_what_python_knows()
        before = dict(self._tracker.births)
        gc.collect()
        after = self._tracker.births
        stats = torch.cuda.memory_stats() if torch.cuda.is_available() else {}
        return _Moment(
            _grouped(after.items()),
            _grouped((key, birth) for key, birth in before.items() if after.get(key) is not birth),
            stats.get("allocated_bytes.all.current", 0),
            stats.get("reserved_bytes.all.current", 0),
        )

    def _holders_in_garbage(self) -> dict[_Group, str]:
        """Collect garbage once, and return the holders of tensors that only reference cycles kept alive."""
        flags, first = gc.get_debug(), len(gc.garbage)
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
        finally:
            gc.set_debug(flags)
        garbage = gc.garbage[first:]
        del gc.garbage[first:]
        holders: dict[_Group, str] = {}
        for tensor in live_tensors(garbage):
            birth = self._tracker.births.get(storage_key(tensor))
            if birth is not None and not holders.get(_group_of(birth)):
                holders[_group_of(birth)] = holder_in_garbage(tensor, garbage)
        return holders

    def _grown(self) -> tuple[list[Growth], dict[_Group, dict[int, Birth]]]:
        """Return growths that are held, and the storages in them that were made in the steps that count."""
        growths: list[Growth] = []
        new: dict[_Group, dict[int, Birth]] = {}
        for group, births in self._moments[-1].alive.items():
            of_each = [moment.alive.get(group, {}) for moment in self._moments]
            sizes = [_bytes_of(births_then) for births_then in of_each]
            kind = _kind_of(sizes)
            if kind is not None:
                divisor = self._steps if kind == "leak" else 1
                new[group] = {key: birth for key, birth in births.items() if birth.step >= self._warmup}
                growth = Growth(
                    kind=kind,
                    **group._asdict(),
                    shapes=_shapes(new[group]),
                    bytes_per_step=(sizes[-1] - sizes[0]) // divisor,
                    count_per_step=round((len(births) - len(of_each[0])) / divisor, 2),
                )
                growths.append(growth)
        return growths, new

    def _cycles(self, holders: dict[_Group, str]) -> Iterator[Growth]:
        for group, births in self._moments[-1].garbage.items():
            of_each = [moment.garbage.get(group, {}) for moment in self._moments[1:]]
            if sum(map(bool, of_each)) > 1:
                yield Growth(
                    kind="cycle",
                    **group._asdict(),
                    shapes=_shapes(births),
                    bytes_per_step=sum(map(_bytes_of, of_each)) // self._steps,
                    count_per_step=round(sum(map(len, of_each)) / self._steps, 2),
                    holder=holders.get(group, ""),
                )

    def _with_holders(self, growths: list[Growth], new: dict[_Group, dict[int, Birth]]) -> Iterator[Growth]:
        """Add the holders of the largest growths."""
        graph: str | None = None
        for position, growth in enumerate(growths):
            births = new.get(_Group(growth.site, growth.dtype, growth.device))
            if births is None or growth.kind == "cycle" or position >= _MOST_HOLDERS:
                yield growth
                continue
            holder = _holder_of_any(births)
            if not holder:
                graph = self._holder_of_graph(new) if graph is None else graph
                holder = graph
            yield dataclasses.replace(growth, holder=holder)

    def _holder_of_graph(self, new: dict[_Group, dict[int, Birth]]) -> str:
        """Return a variable with an autograd graph that keeps memory no tensor in Python shows."""
        keys = {key for births in new.values() for key in births}
        with_graph = list(_with_graph())
        holder = holder_of(*(tensor for tensor in with_graph if storage_key(tensor) in keys))
        if holder:
            return f"the autograd graph of {holder}"
        largest = max(with_graph, key=_num_nodes, default=None)
        num_nodes = 0 if largest is None else _num_nodes(largest)
        if num_nodes <= self._most_nodes_before:
            return ""
        holder = holder_of(largest)
        return f"the autograd graph of {holder}, which has grown to {num_nodes} nodes" if holder else ""

    def _fragmentation(self) -> int:
        reserved = [moment.reserved_bytes for moment in self._moments]
        allocated = [moment.allocated_bytes for moment in self._moments]
        if _kind_of(reserved) != "leak" or allocated[-1] > allocated[0]:
            return 0
        return (reserved[-1] - reserved[0]) // self._steps


def find_leaks(step_fn: Callable[[], object], steps: int = 3, *, warmup: int = 1) -> LeakReport:
    """Run a step several times and report what grows with each: its shape, bytes, origin and holder.

    Distinguishes leaks, garbage in cycles (gone when Python's collector runs), memory that grew once (caches), and
    memory of the allocator that grows while tensors do not. :class:`LeakFinder` explains how, at what cost, and its
    limits.

    Args:
        step_fn: one step, alike each time; called ``warmup + steps`` times.
        steps: number of steps to compare, at least two.
        warmup: number of steps before that, in which caches and optimizer states are made; at least one.

    Returns:
        The findings; ``table()`` is for people.

    Raises:
        UserError: if there are too few steps.
    """
    with LeakFinder(steps=steps, warmup=warmup) as finder:
        for _ in range(warmup + steps):
            step_fn()
            finder.step_ended()
    return finder.report


def _kind_of(sizes: list[int]) -> Kind | None:
    """Classify the growth of a number of bytes; None if it did not grow, or went up and down."""
    changes = [after - before for before, after in itertools.pairwise(sizes)]
    if any(change < 0 for change in changes) or not any(changes):
        return None
    return "leak" if sum(change > 0 for change in changes) > 1 else "once"


def _group_of(birth: Birth) -> _Group:
    return _Group(birth.site, birth.dtype, birth.device)


def _grouped(births: Iterable[tuple[int, Birth]]) -> dict[_Group, dict[int, Birth]]:
    groups: dict[_Group, dict[int, Birth]] = {}
    for key, birth in births:
        groups.setdefault(_group_of(birth), {})[key] = birth
    return groups


def _bytes_of(births: dict[int, Birth]) -> int:
    return sum(birth.num_bytes for birth in births.values())


def _shapes(births: dict[int, Birth]) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(birth.shape for birth in births.values()))[:3]


def _holder_of_any(births: dict[int, Birth]) -> str:
    """Return a variable that leads to a tensor of some storages, the oldest first: the newest may be held rightly."""
    tensors: dict[int, list[Tensor]] = {}
    for tensor in live_tensors():
        if storage_key(tensor) in births:
            # Several tensors may share one storage, and some are held by a graph alone.
            tensors.setdefault(storage_key(tensor), []).append(tensor)
    oldest = [key for key in births if key in tensors][:3]
    return holder_of(*(tensor for key in oldest for tensor in tensors[key]))


def _most_nodes(so_far: int) -> int:
    return max(so_far, *map(_num_nodes, _with_graph()), 0)


def _with_graph() -> Iterator[Tensor]:
    return (tensor for tensor in live_tensors() if tensor.grad_fn is not None)


def _num_nodes(tensor: Tensor) -> int:
    """Count the nodes of the autograd graph behind a tensor."""
    seen = {tensor.grad_fn}
    frontier = [tensor.grad_fn]
    while frontier and len(seen) < _MOST_NODES:
        node = frontier.pop()
        for following, _ in node.next_functions if node is not None else ():
            if following is not None and following not in seen:
                seen.add(following)
                frontier.append(following)
    return len(seen)
