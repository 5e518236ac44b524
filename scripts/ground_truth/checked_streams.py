"""Runs of :mod:`copy_cases` on a virtual GPU that looks for races, and what it finds when an ordering is left out.

    PYTHONPATH=scripts python -m ground_truth.checked_streams    # all cases, each ordering in turn; minutes

An ordering is a pair of lines: where an event was recorded and where a stream, or the host, waits for it; of several
waits of one line in a row, each is one. A virtual GPU's trace does not depend on them. So each case is traced once, and
what its checker was told is told to a new one again, without the one ordering. One whose absence makes no race in any
case needs a reason; it is *implied* where whoever waits came after the event anyway, each time.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

from ground_truth.copy_cases import CASES, CopyCase, in_small_pieces, make_model

from lowmem_ft import VirtualGPU
from lowmem_ft.errors import RaceError
from lowmem_ft.estimator.tracing import trace_layers
from lowmem_ft.memory.host_memory import HostMemory
from lowmem_ft.models import load_model_config
from lowmem_ft.recipe import load_recipe
from lowmem_ft.virtual_gpu.races import checker
from lowmem_ft.virtual_gpu.races.stream_order import StreamOrder

ENGINE = "memory/host_copies.py"
GPU = "rtx-4090"

Site = str


@dataclass(frozen=True)
class Edge:
    """One ordering.

    Args:
        recorded: the lines by which the event came.
        waited: the lines by which somebody waits for it.
        number: of the waits of these lines in a row.
        by_host: whether the host waits.
    """

    recorded: Site
    waited: Site
    number: int
    by_host: bool

    def __str__(self) -> str:
        nth = f" ({self.number + 1})" if self.number else ""
        return f"{'the host at ' if self.by_host else ''}{self.waited}{nth} waits for {self.recorded}"


@dataclass(slots=True)
class Told:
    """A call of the checker's order; of a wait, also which ordering it is."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    edge: Edge | None = None


class KeptOrder(StreamOrder):
    """Judges as ever, and keeps all that it is told.

    Attributes:
        told: the calls.
        implied: orderings that have never added anything to what was known.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Told] = []
        self.implied: dict[Edge, bool] = {}
        self._recorded_at: dict[int, Site] = {}
        self._in_a_row = 0

    def record_event(self, event: int, stream: int) -> None:
        """See :class:`StreamOrder`."""
        self._recorded_at[event] = _site()
        self.told.append(Told("record_event", (event, stream)))
        super().record_event(event, stream)

    def wait_event(self, event: int, stream: int | None) -> bool:
        """See :class:`StreamOrder`."""
        site, before = _site(), self._last_wait()
        self._in_a_row = self._in_a_row + 1 if before is not None and before.waited == site else 0
        edge = Edge(self._recorded_at.get(event, "nothing"), site, self._in_a_row, stream is None)
        self.told.append(Told("wait_event", (event, stream), edge=edge))
        is_needed = super().wait_event(event, stream)
        self.implied[edge] = self.implied.get(edge, True) and not is_needed
        return is_needed

    def wait_stream(self, other: int, stream: int | None) -> bool:
        """See :class:`StreamOrder`."""
        self.told.append(Told("wait_stream", (other, stream)))
        return super().wait_stream(other, stream)

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

    def _last_wait(self) -> Edge | None:
        """The call before, if it was a wait; an event that is recorded for a wait is passed over."""
        for told in reversed(self.told[-2:]):
            if told.name != "record_event":
                return told.edge
        return None

    def makes_race_without(self, edge: Edge) -> bool:
        """Whether the same program makes a race if an ordering is left out."""
        order = StreamOrder()
        for told in self.told:
            if told.edge != edge or edge is None:
                getattr(order, told.name)(*told.args, **told.kwargs)
                if order.conflicts:
                    return True
        return False


def checked_gpu(case: CopyCase, folder: Path, disk_folder: Path) -> VirtualGPU:
    """A virtual GPU that has run a case's steps; its ``races`` are what was found."""
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
    pins = contextlib.nullcontext() if case.pins else mock.patch.object(HostMemory, "_pinned", _refused)
    with in_small_pieces(), pins, contextlib.suppress(RaceError):
        trace_layers(recipe, load_model_config(recipe.model, architecture_only=True), gpu)
    return gpu


def kept_order(case: CopyCase, folder: Path, disk_folder: Path) -> KeptOrder:
    """What the checker of such a run was told."""
    with mock.patch.object(checker, "StreamOrder", KeptOrder):
        order = checked_gpu(case, folder, disk_folder).recorder.checker.order  # type: ignore[union-attr]
    assert isinstance(order, KeptOrder)
    return order


@dataclass
class Findings:
    """What leaving out each ordering of some cases has shown.

    Args:
        false_alarms: races of cases with all of their orderings.
        found: orderings whose absence makes a race.
        implied: those whose absence makes none, as whoever waits came after the event anyway.
        unneeded: the rest.
        num_accesses: that were judged in all cases as they are.
    """

    false_alarms: int = 0
    found: set[Edge] = field(default_factory=set)
    implied: set[Edge] = field(default_factory=set)
    unneeded: set[Edge] = field(default_factory=set)
    num_accesses: int = 0


def leave_out_each(cases: Sequence[CopyCase], folder: Path, disk_folder: Path) -> Findings:
    """Leave out each ordering of some cases in turn, in each case until one makes a race."""
    findings, implied = Findings(), dict[Edge, bool]()
    for case in cases:
        order = kept_order(case, folder, disk_folder)
        findings.false_alarms += len(order.conflicts)
        findings.num_accesses += sum(told.name == "access" for told in order.told)
        for edge, is_implied in order.implied.items():
            implied[edge] = implied.get(edge, True) and is_implied
            if edge not in findings.found and not is_implied and order.makes_race_without(edge):
                findings.found.add(edge)
    for edge in implied.keys() - findings.found:
        (findings.implied if implied[edge] else findings.unneeded).add(edge)
    return findings


def _refused(memory: HostMemory, num_bytes: int) -> None:
    memory.is_pinned = False


def _site() -> Site:
    """The lines of the package that lead here, the engine's own and the two of its callers."""
    lines = []
    for file, line in _package_lines(sys._getframe(2)):
        lines.append(f"{file.rpartition('/')[2]}:{line}")
        if file != ENGINE:
            break
    return " < ".join(lines) or "the program"


def _package_lines(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        _, found, file = frame.f_code.co_filename.rpartition("/lowmem_ft/")
        if found and not file.startswith("virtual_gpu/"):
            yield file, frame.f_lineno
        frame = frame.f_back


def main() -> None:
    """Print what was found."""
    with tempfile.TemporaryDirectory() as folder:
        findings = leave_out_each(list(CASES.values()), Path(folder), Path(folder))
    for name in ("found", "implied", "unneeded"):
        edges = sorted(map(str, getattr(findings, name)))
        print(f"{len(edges)} {name}", *edges, sep="\n  ", end="\n\n")
    print(f"{len(CASES)} runs, {findings.num_accesses:,} accesses, {findings.false_alarms} false alarms")


if __name__ == "__main__":
    main()
