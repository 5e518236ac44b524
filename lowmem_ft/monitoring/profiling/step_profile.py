"""The profile of training steps as plain values: seconds by part of the step, operator and module, and its tables."""

from __future__ import annotations

import dataclasses
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.monitoring.text_table import WIDTH, text_table

PYTHON = "(Python)"
"""In place of an operator: time of the host between operators, such as hooks and launches by Python code."""

OUTSIDE = "(outside the model)"
"""In place of a module: outside the forward and backward of any."""

FORWARD, RECOMPUTATION, BACKWARD, UPDATE, REST = "forward", "recomputation", "backward", "update", "rest"
DATA, CLIPPING, FETCH = "data", "clipping", "fetch of the loss"
PARTS = (DATA, FORWARD, RECOMPUTATION, BACKWARD, CLIPPING, FETCH, UPDATE, REST)
"""Parts of a step, in their order; recomputation is the forward that checkpointing runs again in backward."""


@dataclass(frozen=True, kw_only=True)
class ProfileRow:
    """Time of one operator in one module, or several alike, in one part of the step; a mean over the steps.

    Attributes:
        part: the part of the step, one of ``PARTS``.
        module: qualified name, with ``*`` for the places in lists of modules that take alike.
        operator: name of the operator, of the autograd node, or ``PYTHON``.
        calls: calls a step.
        host_seconds: seconds of the host a step, without the operators within.
        device_seconds: seconds of its kernels and copies a step; 0 without a GPU.
        wait_seconds: seconds a step that the host waited for the device in it.
    """

    part: str
    module: str
    operator: str
    calls: float
    host_seconds: float
    device_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SlowModule:
    """A module that takes longer than others like it.

    Attributes:
        module: its qualified name.
        seconds: seconds a step, without the modules within.
        others_seconds: the median of those like it.
    """

    module: str
    seconds: float
    others_seconds: float


@dataclass(frozen=True, kw_only=True)
class Section:
    """One table.

    Attributes:
        title: a line above it.
        headings: headings of its columns, the first one of words, the others of numbers.
        rows: the cells.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Time of some training steps, and where it went.

    Attributes:
        steps: numbers of the first and the last step.
        num_steps: number of steps.
        step_seconds: mean seconds of a step, the profiler's own included.
        device: type of the device, ``cpu`` or ``cuda``.
        busy_seconds: seconds of a step in which the device computed or copied; on a CPU 0.
        rows: the times; their host seconds sum to ``step_seconds`` on a CPU.
        classes: class of each module in the rows, by its name.
        slow: modules that take at least twice as long as those like them.
        predicted: seconds of a step by operator on the clock of an estimate; empty: no such clock.
        advice: what to change first, a sentence each.
    """

    steps: tuple[int, int]
    num_steps: int
    step_seconds: float
    device: str
    busy_seconds: float
    rows: tuple[ProfileRow, ...]
    classes: Mapping[str, str]
    slow: tuple[SlowModule, ...] = ()
    predicted: Mapping[str, float] = field(default_factory=dict)
    advice: tuple[str, ...] = ()

    @property
    def is_on_device(self) -> bool:
        """True if the steps ran on a GPU, whose seconds count."""
        return self.device != "cpu"

    def seconds_of(self, row: ProfileRow) -> float:
        """Return the seconds of a row that count: the device's, or those of the host on a CPU."""
        return row.device_seconds if self.is_on_device else row.host_seconds

    def total(self, rows: Iterable[ProfileRow] | None = None) -> float:
        """Return the seconds that count of some rows, or of all."""
        return math.fsum(self.seconds_of(row) for row in (self.rows if rows is None else rows))

    def share(self, rows: Iterable[ProfileRow]) -> float:
        """Return the share of some rows in all that count; 0 if nothing was measured."""
        return self.total(rows) / (self.total() or 1.0)

    def label(self, module: str) -> str:
        """Return a module's name with its class."""
        return f"{module or '(the model)'} {self.classes.get(module, '')}".rstrip()

    def sections(self, max_rows: int = 12) -> Iterator[Section]:
        """Yield the tables, each with its largest rows first; one row sums up the others.

        Args:
            max_rows: rows of a table.
        """
        yield self._by_part()
        yield self._by_operator(max_rows)
        yield self._by_module(max_rows)
        if any(row.wait_seconds for row in self.rows):
            yield self._waits(max_rows)

    def table(self, max_rows: int = 12) -> str:
        """Return all tables, 80 columns wide, and what to change first.

        Args:
            max_rows: rows of a table.
        """
        texts = [self.title]
        texts += [
            f"{one.title}\n{text_table(one.headings, one.rows)}"
            for one in self.sections(max_rows)
            if one.rows
        ]
        if self.advice:
            texts.append("\n".join(("What to change first", *map(_ITEM.fill, self.advice))))
        return "\n\n".join(texts)

    @property
    def title(self) -> str:
        """The steps, and their seconds, in a line."""
        first, last = self.steps
        steps = f"step {first}" if first == last else f"steps {first} to {last}"
        device = (
            f", the device busy for {self.busy_seconds / (self.step_seconds or 1):.0%}"
            if self.is_on_device
            else " on a CPU, so no columns of a device"
        )
        return f"Profile of {steps}: {_time(self.step_seconds)} ms a step{device}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, from which :meth:`from_json` makes the same profile."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> StepProfile:
        """Make a profile from the values of :meth:`to_json`.

        Raises:
            TypeError: if names are missing or unknown.
        """
        rows = tuple(ProfileRow(**row) for row in values["rows"])
        slow = tuple(SlowModule(**one) for one in values["slow"])
        first, last = values["steps"]
        rest = {"rows": rows, "slow": slow, "steps": (first, last), "advice": tuple(values["advice"])}
        return cls(**{**values, **rest})

    def _by_part(self) -> Section:
        parts = _grouped(self.rows, lambda row: row.part)
        known = [part for part in PARTS if part in parts]
        return Section(
            title="By part of the step, in ms a step",
            headings=("part", *self._time_headings),
            rows=[(part, *self._times(parts[part])) for part in known],
        )

    def _by_operator(self, max_rows: int) -> Section:
        groups = _grouped(self.rows, lambda row: row.operator)
        headings = ("operator, and where most of it is", "calls", *self._time_headings)
        clock = ("clock",) if self.predicted else ()

        def cells(rows: Sequence[ProfileRow]) -> tuple[str, ...]:
            predicted = math.fsum(self.predicted.get(name, 0.0) for name in {row.operator for row in rows})
            by_clock = (_time(predicted) if predicted else "-",) if clock else ()
            return f"{sum(row.calls for row in rows):,.0f}", *self._times(rows), *by_clock

        def name(operator: str, rows: Sequence[ProfileRow]) -> str:
            by_module = _grouped(rows, lambda row: (row.part, row.module))
            (part, module), _ = max(by_module.items(), key=lambda one: self.total(one[1]))
            place = "" if module == OUTSIDE else f" of {module or 'the model'}"
            return f"{operator}  {part}{place}"

        return Section(
            title="By operator, in ms a step",
            headings=(*headings, *clock),
            rows=self._largest(groups, name, cells, max_rows),
        )

    def _by_module(self, max_rows: int) -> Section:
        groups = _grouped(self.rows, lambda row: row.module)
        parts = [
            part for part in (FORWARD, RECOMPUTATION, BACKWARD) if any(row.part == part for row in self.rows)
        ]

        def cells(rows: Sequence[ProfileRow]) -> tuple[str, ...]:
            of_parts = [self.total(row for row in rows if row.part == part) for part in parts]
            return *map(_time, of_parts), _time(self.total(rows)), f"{self.share(rows):.0%}"

        return Section(
            title="By module without the modules within, in ms a step",
            headings=("module", *map(_SHORT.__getitem__, parts), "in all", "share"),
            rows=self._largest(groups, lambda module, _: self.label(module), cells, max_rows),
        )

    def _waits(self, max_rows: int) -> Section:
        waiting = [row for row in self.rows if row.wait_seconds]
        rows = sorted(waiting, key=lambda row: row.wait_seconds, reverse=True)[:max_rows]
        return Section(
            title="Where the host waits for the device, in ms a step",
            headings=("operator", "calls", "waits"),
            rows=[
                (
                    f"{row.operator}  {row.part} of {self.label(row.module)}",
                    f"{row.calls:,.0f}",
                    _time(row.wait_seconds),
                )
                for row in rows
            ],
        )

    @property
    def _time_headings(self) -> tuple[str, ...]:
        return ("host", "device", "share") if self.is_on_device else ("host", "share")

    def _times(self, rows: Sequence[ProfileRow]) -> tuple[str, ...]:
        host = _time(math.fsum(row.host_seconds for row in rows))
        device = (_time(self.total(rows)),) if self.is_on_device else ()
        return host, *device, f"{self.share(rows):.0%}"

    def _largest(
        self,
        groups: Mapping[str, Sequence[ProfileRow]],
        name: Callable[[str, Sequence[ProfileRow]], str],
        cells: Callable[[Sequence[ProfileRow]], tuple[str, ...]],
        max_rows: int,
    ) -> list[tuple[str, ...]]:
        ordered = sorted(groups.items(), key=lambda group: self.total(group[1]), reverse=True)
        shown = [(name(key, rows), *cells(rows)) for key, rows in ordered[:max_rows]]
        if others := [row for _, rows in ordered[max_rows:] for row in rows]:
            shown.append((f"({len(ordered) - max_rows} more)", *cells(others)))
        return shown


_ITEM = textwrap.TextWrapper(
    WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
)
_SHORT = {FORWARD: "forward", RECOMPUTATION: "again", BACKWARD: "backward"}


def _grouped(rows: Iterable[ProfileRow], key: Callable[[ProfileRow], Any]) -> dict[Any, list[ProfileRow]]:
    groups: dict[Any, list[ProfileRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def _time(seconds: float) -> str:
    """Format seconds as milliseconds."""
    return f"{1000 * seconds:,.1f}" if seconds else "-"
