"""Runs that copy, on a virtual GPU that checks for races, and its findings when an ordering is left out.

Runs are the cases of :mod:`copy_cases` and the visits of :mod:`small_visits`. An ordering is a pair of places: where
events are recorded, and where a stream, or the host, waits for them. The further course of a virtual GPU's program does
not depend on them. So each run is traced once, and the calls of its checker are replayed to a new one, without the one
ordering. If that makes a race in no run, the ordering should be *implied* by others, which is checked, too: with it and
without, at each access to memory, the accessing stream or host comes after the same work.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
from ground_truth import small_visits
from ground_truth.copy_cases import CopyCase, in_small_pieces, make_model
from torch import Tensor

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import RaceError
from lowmem_ft.foundation.host.copy_engine import PutOffCopy
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.models.hf_config import load_model_config
from lowmem_ft.planning.estimator.traces.tracing import trace_layers
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.races import checker
from lowmem_ft.virtual_gpu.races.happens_before import Clock, Span
from lowmem_ft.virtual_gpu.races.stream_order import StreamOrder
from lowmem_ft.virtual_gpu.values.questions import Questions

ENGINE = "foundation/host/copy_engine.py"
GPU = "rtx-4090"

Site = str


@dataclass(frozen=True)
class Edge:
    """One ordering.

    Args:
        recorded: the lines through which the event was recorded.
        waited: the lines through which a stream or the host waits for it.
        by_host: whether the host waits.
    """

    recorded: Site
    waited: Site
    by_host: bool

    def __str__(self) -> str:
        return f"{'the host at ' if self.by_host else ''}{self.waited} waits for {self.recorded}"


@dataclass(slots=True)
class Told:
    """A call of the checker's order; for a wait, also its ordering."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    edge: Edge | None = None


class KeptOrder(StreamOrder):
    """An order that judges as usual, and keeps all calls.

    Attributes:
        told: the calls.
        edges: the orderings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []
        self.edges: set[Edge] = set()
        self._recorded_at: dict[int, Site] = {}

    def record_event(self, event: int, stream: int) -> None:
        """See :class:`StreamOrder`."""
        self._recorded_at[event] = _site()
        self.told.append(Told("record_event", (event, stream)))
        super().record_event(event, stream)

    def wait_event(self, event: int, stream: int | None) -> None:
        """See :class:`StreamOrder`."""
        edge = Edge(self._recorded_at.get(event, "nothing"), _site(), stream is None)
        self.told.append(Told("wait_event", (event, stream), edge=edge))
        self.edges.add(edge)
        super().wait_event(event, stream)

    def wait_stream(self, other: int, stream: int | None) -> None:
        """See :class:`StreamOrder`."""
        self.told.append(Told("wait_stream", (other, stream)))
        super().wait_stream(other, stream)

    def allocated(self, index: int, num_bytes: int, stream: int | None) -> None:
        """See :class:`StreamOrder`."""
        self.told.append(Told("allocated", (index, num_bytes, stream)))
        super().allocated(index, num_bytes, stream)

    def freed(self, index: int) -> None:
        """See :class:`StreamOrder`."""
        self.told.append(Told("freed", (index,)))
        super().freed(index)

    def access(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`StreamOrder`."""
        self.told.append(Told("access", args, kwargs))
        super().access(*args, **kwargs)

    def makes_race_without(self, edge: Edge) -> bool:
        """Return whether the same program makes a race if an ordering is left out."""
        return any(order.conflicts for order in self._again(edge))

    def is_same_without(self, edge: Edge) -> bool:
        """Return whether each access to memory comes after the same work if an ordering is left out."""
        pairs = zip(self._again(None), self._again(edge), strict=True)
        return all(with_it.known == without.known for with_it, without in pairs)

    def _again(self, left_out: Edge | None) -> Iterator[_Known]:
        """Replay the calls to another order, without one ordering; yield that order after each access to memory."""
        order = _Known()
        for told in self.told:
            if left_out is None or told.edge != left_out:
                getattr(order, told.name)(*told.args, **told.kwargs)
            if told.name == "access":
                yield order


class _Known(StreamOrder):
    """An order that judges as usual; ``known`` is the work that was over for the agent of the last access to memory."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Clock = {}

    def access(self, index: int, stream: int | None, span: Span, *, writes: bool, what: object) -> None:
        """See :class:`StreamOrder`."""
        super().access(index, stream, span, writes=writes, what=what)
        self.known = self.clock(stream)


def checked_gpu(case: CopyCase, folder: Path, disk_folder: Path) -> VirtualGPU:
    """Return a virtual GPU that has run a case's steps; its ``races`` are the findings."""
    recipe = load_recipe(
        None,
        [
            "data=any",
            f"model={make_model(folder, case)}",
            "model.weights=random",
            "data.max_length=16",
            "training.gradient_accumulation_steps=2",
            "training.per_device_train_batch_size=2",
            *case.settings,
            *([f"offload.folder={disk_folder}"] if case.in_files else []),
        ],
    )
    gpu = VirtualGPU(GPU, check_streams=True)
    with in_small_pieces(), _pinning(case.pins), contextlib.suppress(RaceError):
        trace_layers(recipe, load_model_config(recipe.model, architecture_only=True), gpu)
    return gpu


def visited_gpu(visit: Callable[[], None], *, pins: bool) -> VirtualGPU:
    """Return a virtual GPU that a visit was made on; the visit's assertions on values are taken for true."""
    gpu = VirtualGPU(GPU, check_streams=True)
    allocate = HostMemory.allocate

    def allocate_on_host(*args: Any, **kwargs: Any) -> Tensor:
        with torch.device("cpu"):
            return allocate(*args, **kwargs)

    with (
        in_small_pieces(),
        _pinning(pins),
        mock.patch.object(HostMemory, "allocate", allocate_on_host),
        mock.patch.object(Questions, "answer", return_value=True),
        mock.patch.object(small_visits, "DEVICE", gpu.device),
        contextlib.suppress(RaceError),
        gpu,
        torch.device(gpu.device),
    ):
        for count in (2**10, 2**20):  # memory that is reused, in both of the allocator's pools
            torch.ones(count)
        visit()
    return gpu


@contextlib.contextmanager
def orders_kept() -> Iterator[None]:
    """Make virtual GPUs that are created in a block keep the calls of their checkers, for :func:`kept_by`."""
    with mock.patch.object(checker, "StreamOrder", KeptOrder):
        yield


def kept_by(gpu: VirtualGPU) -> KeptOrder:
    """Return the calls of a virtual GPU's checker."""
    assert gpu.recorder.checker is not None
    assert isinstance(gpu.recorder.checker.order, KeptOrder), "see orders_kept"
    return gpu.recorder.checker.order


def orders_of_visits() -> Iterator[KeptOrder]:
    """Yield the order of each visit, with pinned memory and with pageable."""
    with orders_kept():
        for pins, visit in itertools.product((True, False), small_visits.VISITS):
            yield kept_by(visited_gpu(visit, pins=pins))


@dataclass
class Findings:
    """Findings of leaving out each ordering of some runs.

    Args:
        num_false_alarms: races of runs with all of their orderings.
        found: orderings whose absence makes a race.
        implied: those whose absence makes no race, and changes nothing.
        missed: the others: the waiting side comes after more work with them than without, and no run has shown a need.
    """

    num_false_alarms: int = 0
    found: set[Edge] = field(default_factory=set)
    implied: set[Edge] = field(default_factory=set)
    missed: set[Edge] = field(default_factory=set)


def leave_out_each(orders: Iterable[KeptOrder]) -> Findings:
    """Leave out each ordering of some runs in turn, in each run until one makes a race."""
    findings, needed = Findings(), set[Edge]()
    for order in orders:
        findings.num_false_alarms += len(order.conflicts)
        for edge in order.edges - findings.found:
            if order.makes_race_without(edge):
                findings.found.add(edge)
            elif edge not in needed and not order.is_same_without(edge):
                needed.add(edge)
            findings.implied.add(edge)
    findings.missed = needed - findings.found
    findings.implied -= needed | findings.found
    return findings


def _pinning(pins: bool) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if pins else mock.patch.object(HostMemory, "_pinned", _refused)


def _refused(memory: HostMemory, num_bytes: int) -> None:
    memory.is_pinned = False


def _site() -> Site:
    """Return the engine's functions that lead here, the line that calls it, and the callers of private functions.

    The line at which a deferred copy is made depends on who waits first: it is one place, whoever does.
    """
    steps: list[str] = []
    caller = ""
    for frame in _package_frames(sys._getframe(2)):
        code = frame.f_code
        file, source = (
            code.co_filename.rpartition("/")[2],
            linecache.getline(code.co_filename, frame.f_lineno),
        )
        if caller:
            steps.append(code.co_name if file == caller else f"{file} {code.co_name}")
        elif not code.co_filename.endswith(ENGINE):
            steps.append(f"{file} {code.co_name}: {source.strip()}")
            caller = file
        elif code is PutOffCopy.make.__code__:
            return " < ".join([*steps, "a copy that was put off"])
        else:
            steps.append(code.co_name if steps else source.strip())
        if caller and not code.co_name.startswith(("_", "<")):
            return " < ".join(steps)
    return " < ".join([*steps, "the program"])


def _package_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        _, found, file = frame.f_code.co_filename.rpartition("/lowmem_ft/")
        if found and not file.startswith("virtual_gpu/"):
            yield frame
        frame = frame.f_back
