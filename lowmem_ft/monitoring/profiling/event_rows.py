"""Rows of a profile from the profiler's events: each operator's own time, with its module and its part of the step.

Events nest by time. Ranges tell modules and parts of the step. A node of autograd carries the sequence number with
which an operator of the forward pass made it: their module is the same. A module that runs inside a node is run again,
since its layer is checkpointed. A node that adds up a gradient has no number: the engine runs it right after the node
that completed the gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lowmem_ft.monitoring.profiling.module_ranges import MODULE, PART, STEP
from lowmem_ft.monitoring.profiling.step_profile import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    PYTHON,
    RECOMPUTATION,
    REST,
    UPDATE,
    ProfileRow,
)

_NODE = "autograd::engine::evaluate_function: "
_OPTIMIZER = "Optimizer."
_WAITS = ("Synchronize", "cudaStreamWaitEvent", "cudaMemcpy")
_MICROSECOND = 1e-6


class Event(Protocol):
    """The attributes of torch's ``FunctionEvent`` that count here."""

    name: str
    thread: int
    sequence_nr: int
    time_range: Any
    cpu_parent: Any
    device_type: Any

    @property
    def fwd_thread(self) -> int | None:
        """Thread of the operator that made a node; 0 or None: there is no such operator."""
        ...

    @property
    def kernels(self) -> Sequence[Any]:
        """Kernels and copies that it launched itself."""
        ...

    @property
    def cpu_children(self) -> Sequence[Any]:
        """Events within it, in the same thread."""
        ...

    @property
    def is_user_annotation(self) -> bool | None:
        """True for a range."""
        ...


@dataclass(frozen=True)
class _Place:
    """The program's position: the part of the step and the module; the operator if an estimate counts it as one."""

    part: str = REST
    module: str = OUTSIDE
    operator: str = ""
    is_in_backward: bool = False


@dataclass
class _Times:
    calls: int = 0
    host: float = 0.0
    device: float = 0.0
    waits: float = 0.0


@dataclass
class EventRows:
    """Rows of the steps in a profile.

    Args:
        events: all events.
        as_one: names of operators whose time includes that of the operators within, as an estimate counts them.
    """

    events: Iterable[Event]
    as_one: Container[str] = ()
    _times: dict[tuple[str, str, str], _Times] = field(default_factory=dict)
    _module_of: dict[tuple[int, int], str] = field(default_factory=dict)
    _last_node: dict[int, str] = field(default_factory=dict)

    def by_step(self) -> Iterator[list[ProfileRow]]:
        """Yield the rows of each step, with the full name of each module."""
        roots = sorted(filter(_is_root, self.events), key=_start)
        for step in roots:
            if step.name == STEP:
                in_other_threads = [
                    root for root in roots if root.name.startswith(_NODE) and _is_within(root, step)
                ]
                yield self._rows_of(step, in_other_threads)

    def _rows_of(self, step: Event, in_other_threads: Sequence[Event]) -> list[ProfileRow]:
        self._times = defaultdict(_Times)
        self._walk(step, _Place())
        for node in in_other_threads:
            self._walk(node, _Place(part=BACKWARD))
        # While other threads compute the gradients, this one only waits for them.
        waiting = self._times.get((BACKWARD, OUTSIDE, PYTHON))
        if waiting is not None:
            elsewhere = sum(node.time_range.elapsed_us() for node in in_other_threads)
            waiting.host = max(0.0, waiting.host - elsewhere)
        return [
            ProfileRow(
                part=part,
                module=module,
                operator=operator,
                calls=one.calls,
                host_seconds=one.host * _MICROSECOND,
                device_seconds=one.device * _MICROSECOND,
                wait_seconds=one.waits * _MICROSECOND,
            )
            for (part, module, operator), one in self._times.items()
        ]

    def _walk(self, root: Event, place: _Place) -> None:
        """Count an event and all within it, in the order of time."""
        waiting: list[tuple[Event, _Place]] = [(root, place)]
        while waiting:
            event, around = waiting.pop()
            here, operator = self._enter(event, around)
            self._count(event, here, operator)
            waiting += [(child, here) for child in sorted(event.cpu_children, key=_start, reverse=True)]

    def _enter(self, event: Event, around: _Place) -> tuple[_Place, str]:
        """Return the place within an event, and the name that its own time goes by."""
        name = event.name
        if name == STEP:
            return around, PYTHON
        if name.startswith(PART):
            return replace(around, part=name.removeprefix(PART)), PYTHON
        if name.startswith(_OPTIMIZER):
            return replace(around, part=UPDATE), PYTHON
        if name.startswith(MODULE):
            part = RECOMPUTATION if around.is_in_backward else FORWARD
            return replace(around, part=part, module=name.removeprefix(MODULE)), PYTHON
        if name.startswith(_NODE):
            module = self._module_of_node(event)
            place = replace(around, part=BACKWARD, module=module, is_in_backward=True)
            return place, name.removeprefix(_NODE)
        if around.operator:
            return around, around.operator
        if _is_of_driver(name):
            return around, ""
        if event.sequence_nr >= 0:
            # The last operator with a number makes the node; those before it only looked at the counter.
            self._module_of[event.thread, event.sequence_nr] = around.module
        bare = name.rpartition("::")[2]
        if bare in self.as_one:
            return replace(around, operator=bare), bare
        return around, bare if name.startswith("aten::") else name

    def _module_of_node(self, event: Event) -> str:
        if event.sequence_nr >= 0:
            key = (event.fwd_thread or event.thread, event.sequence_nr)
            self._last_node[event.thread] = self._module_of.get(key, OUTSIDE)
        return self._last_node.get(event.thread, OUTSIDE)

    def _count(self, event: Event, place: _Place, operator: str) -> None:
        own = event.time_range.elapsed_us() - sum(
            child.time_range.elapsed_us() for child in event.cpu_children
        )
        is_of_driver = not operator
        if is_of_driver:
            operator = _operator_around(event)
        times = self._times[place.part, place.module, operator]
        times.calls += not is_of_driver
        times.host += max(0.0, own)
        if is_of_driver and any(word in event.name for word in _WAITS):
            times.waits += own
        for kernel in event.kernels:
            if kernel.name != event.name:  # a range is shown on the device, too, and computes nothing
                name = kernel.name if operator == PYTHON else operator
                self._times[place.part, place.module, name].device += kernel.duration


def busy_seconds(events: Iterable[Event]) -> float:
    """Return the seconds in which a device computed or copied, whatever the number of its streams."""
    ranges = {event.name for event in events if event.device_type.name == "CPU" and event.is_user_annotation}
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type.name != "CPU" and event.name not in ranges
    )
    busy, until = 0.0, float("-inf")
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy * _MICROSECOND


def _operator_around(event: Event) -> str:
    parent = event.cpu_parent
    while parent is not None and _is_of_driver(parent.name):
        parent = parent.cpu_parent
    if parent is None or parent.name.startswith((STEP, MODULE, PART, _OPTIMIZER)):
        return PYTHON
    return parent.name.removeprefix(_NODE).removeprefix("aten::")


def _is_root(event: Event) -> bool:
    return event.cpu_parent is None and event.device_type.name == "CPU"


def _is_of_driver(name: str) -> bool:
    """Return whether an event is a call of CUDA's runtime or driver."""
    return name.startswith(("cuda", "cuLaunch", "cuMem"))


def _start(event: Event) -> float:
    return event.time_range.start


def _is_within(event: Event, step: Event) -> bool:
    return bool(step.time_range.start <= _start(event) < step.time_range.end)


def seconds_of_steps(events: Iterable[Event]) -> Iterator[float]:
    """Yield the seconds of each profiled step."""
    for event in events:
        if event.name == STEP and _is_root(event):
            yield event.time_range.elapsed_us() * _MICROSECOND
