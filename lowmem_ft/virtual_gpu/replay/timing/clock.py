"""Time that a log of work takes on a GPU: the host issues it in order, streams run it, events hold them back.

A kernel takes the longer of its arithmetic and its memory traffic, at the rates of its kind and sizes
(``kernel_rates.py``), a copy the time of its bytes on the host link. An operator that runs several kernels costs the
host a launch each; a Triton kernel's launch keeps it as long as several operators, and so does Python between operators
(``upstream/host_python.py``). The log is recorded once and replayed for every GPU. A round that represents several is
replayed as often, so that copies overlap with computation as they do in the program; ``logged_rounds.py`` says how
exact that is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from lowmem_ft.foundation.catalog.clock_rates import ClockRates
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.virtual_gpu.calls.kernel_kinds import KERNEL_KINDS, KernelKind, kind_of
from lowmem_ft.virtual_gpu.calls.work import Work
from lowmem_ft.virtual_gpu.replay.timing.dma_engine import DmaEngine
from lowmem_ft.virtual_gpu.replay.timing.kernel_rates import arithmetic_rate, traffic_rate
from lowmem_ft.virtual_gpu.replay.timing.links import SECONDS_PER_COLLECTIVE, Link, link_between, pcie_rate
from lowmem_ft.virtual_gpu.replay.timing.logged_rounds import (
    COLLECTIVE,
    COPY_TO_DEVICE,
    COPY_TO_HOST,
    HOST_COPY,
    KERNELS,
    MARK,
    RECORD,
    ROUND,
    SYNCHRONIZE,
    WAIT,
    LoggedRound,
    Program,
    program_of,
)

Bound = Literal["compute", "memory bandwidth", "kernel launches", "host copies", "communication"]

BOUNDS: tuple[Bound, ...] = get_args(Bound)

HOST_COPY_RATE = 10e9
"""Bytes a second of a copy within host memory, or from and to a file whose pages are in memory.

An Intel Xeon (2 cores, torch 2.13.0, 2026-11-23) copies 6 to 10 GB a second with one thread, 7 to 16 with two: the
larger rates are of copies from memory, the lower ones of copies to it. The time that a disk adds is not known.
"""

Seconds = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Span:
    """The time from the end of one piece of work to the end of another.

    Args:
        seconds: seconds in all.
        shares: shares of the time by what would shorten it; they sum to 1.
    """

    seconds: float
    shares: dict[Bound, float]

    @property
    def bound_by(self) -> Bound:
        """The bound with the largest share."""
        return max(BOUNDS, key=self.shares.__getitem__)

    @classmethod
    def of_parts(cls, parts: Sequence[tuple[float, Span]]) -> Span:
        """Return the time of several spans one after the other, each as often as it counts."""
        seconds = [times * span.seconds for times, span in parts]
        total = sum(seconds) or 1.0
        weights = [each / total for each in seconds]
        shares: dict[Bound, float] = {
            bound: sum(weight * span.shares[bound] for weight, (_, span) in zip(weights, parts, strict=True))
            for bound in BOUNDS
        }
        return cls(seconds=sum(seconds), shares=shares)


def kinds_of_work(span: Span, of_kernels: Mapping[str, float]) -> dict[str, float]:
    """Return shares of a time by kind of work.

    Waits for the host are left out, as a range takes them by themselves.

    Args:
        span: the time.
        of_kernels: seconds of its kernels by kind, as :meth:`Clock.seconds_by_kind` returns them.
    """
    return {
        **{kind: of_kernels.get(kind, 0.0) / (span.seconds or 1.0) for kind in KERNEL_KINDS},
        "host copies": span.shares["host copies"],
        "communication": span.shares["communication"],
    }


@dataclass(frozen=True, kw_only=True)
class Times:
    """Time at which each entry of a log ran, in seconds from the log's beginning.

    Args:
        starts: start of each entry, on its stream; of ``synchronize``, on the host; the last one, if an entry repeats.
        ends: end of each entry, likewise.
        spent: for each entry, the seconds that the busiest stream spent computing, on memory traffic and on copies or
            collectives or on waiting for one. The rest of its time it waited for the host.
        computing: for each entry, the seconds that its kernels take, on whatever stream; 0 for one that is no kernel.
        is_on_main: for each entry, whether the stream that computes runs it.
    """

    starts: Seconds
    ends: Seconds
    spent: dict[Bound, Seconds]
    computing: Seconds
    is_on_main: NDArray[np.bool_]

    def between(self, first: int, last: int) -> Span:
        """Return the time of the entries from ``first`` up to and without ``last``, for example those of a step.

        It leaves out the time of work from before ``first`` that was still running.

        Args:
            first: index of an entry.
            last: index of a later entry, or the number of entries.

        Returns:
            The time, and what bounds it.
        """
        began = float(self.ends[:first].max(initial=0.0))
        seconds = max(0.0, float(self.ends[:last].max(initial=0.0)) - began)
        spent = {bound: float(column[first:last].sum()) for bound, column in self.spent.items()}
        spent["kernel launches"] = max(0.0, seconds - sum(spent.values()))
        total = sum(spent.values()) or 1.0
        return Span(seconds=seconds, shares={bound: spent[bound] / total for bound in BOUNDS})


class Clock:
    """A log prepared for replays on many GPUs.

    Args:
        entries: the log, in the order of issue; the constructor reads it once.
    """

    def __init__(self, entries: Sequence[Work]) -> None:
        self._entries = entries
        kinds, of_kind = _encode([entry.kind for entry in entries])
        self._is_kernel, self._is_collective, self._is_copy, self._is_host_copy = (
            of_kind == (kinds.index(kind) if kind in kinds else -1)
            for kind in ("kernel", "collective", "copy", "host copy")
        )
        self._times = np.array([entry.times for entry in entries], dtype=np.float64)
        # Nearly all have one launch: no arithmetic for those.
        launches = [1 if entry.launches == 1 else entry.num_launches for entry in entries]
        self._launches = np.array(launches, dtype=np.float64)
        self._python_operators = np.array([entry.python_operators for entry in entries], dtype=np.float64)
        self._by_triton = np.array([entry.by_triton for entry in entries], dtype=bool)
        self._flops = np.array([entry.flops for entry in entries], dtype=np.float64)
        self._bytes = np.array([entry.num_bytes for entry in entries], dtype=np.float64)
        self._streams = np.array([entry.stream for entry in entries], dtype=np.int64)
        self._runs: dict[tuple[float, float, float], _KernelRuns] = {}
        self._operators, self._of_operator = _encode([entry.name for entry in entries])
        forms, self._of_form = _encode(
            [(entry.name, entry.by_triton, entry.dtype, entry.shape) for entry in entries]
        )
        self._forms: list[tuple[KernelKind, str, tuple[int, ...]]] = [
            (kind_of(name, shape, has_products=bool(dtype), by_triton=by_triton), dtype, shape)
            for name, by_triton, dtype, shape in forms
        ]

    def times_on(self, gpu: Gpu, link: Link | None = None) -> Times:
        """Compute when each entry of the log runs on a GPU.

        Products of float32 matrices use TF32 where torch is set to allow it now.

        Args:
            gpu: the GPU.
            link: link to the other ranks; None: that of GPUs in one machine.

        Returns:
            The start and end of each entry.
        """
        reached = gpu.rates
        flops_rates = np.array([arithmetic_rate(gpu, *form) for form in self._forms] or [1.0])
        bytes_rates = np.array([traffic_rate(gpu, kind) for kind, _, _ in self._forms] or [1.0])
        compute = np.where(self._is_kernel, self._flops / flops_rates[self._of_form], 0.0)
        traffic = np.where(self._is_kernel, self._bytes / bytes_rates[self._of_form], 0.0)
        copies = np.where(self._is_copy, self._bytes / host_link_rate(gpu), 0.0)
        sent = self._bytes / (link or link_between(gpu)).bytes_per_second + SECONDS_PER_COLLECTIVE
        collectives = np.where(self._is_collective, sent, 0.0)
        host_copies = np.where(self._is_host_copy, self._bytes / HOST_COPY_RATE, 0.0)
        computing = np.maximum(compute, traffic)
        durations = computing + copies + collectives + host_copies

        main = self._busiest_stream(durations * self._times)
        copying, exchanging = self._side_streams
        numbers = self._program.streams
        replay = _Replay(
            self._program,
            durations,
            self._runs_at(reached),
            numbers.get(main, -1),
            operator_seconds=reached.operator_seconds,
            copying={numbers[stream] for stream in copying},
            exchanging={numbers[stream] for stream in exchanging - {main}},
        )
        starts, ends = replay.times()

        times_on_main = np.where(self._streams == main, self._times, 0.0)
        is_compute = compute >= traffic
        spent: dict[Bound, Seconds] = {
            "compute": times_on_main * np.where(is_compute, compute, 0.0),
            "memory bandwidth": times_on_main * np.where(is_compute, 0.0, traffic),
            "host copies": times_on_main * copies + np.array(replay.copy_stalls),
            "communication": times_on_main * collectives + np.array(replay.exchange_stalls),
        }
        return Times(
            starts=starts,
            ends=ends,
            spent=spent,
            computing=computing * self._times,
            is_on_main=self._streams == main,
        )

    def seconds_by_operator(self, times: Times, first: int, last: int) -> dict[str, float]:
        """Return the seconds that kernels take by the operator's name, in entries from ``first`` up to ``last``."""
        names = self._operators
        seconds = np.bincount(self._of_operator[first:last], times.computing[first:last], len(names)).tolist()
        return {name: spent for name, spent in zip(names, seconds, strict=True) if spent}

    def seconds_by_kind(self, times: Times, first: int, last: int) -> dict[str, float]:
        """Return the seconds that kernels take by their kind, in entries from ``first`` up to ``last``."""
        seconds = np.bincount(
            self._of_form[first:last], times.computing[first:last], len(self._forms)
        ).tolist()
        found: dict[str, float] = {}
        for (kind, _, _), spent in zip(self._forms, seconds, strict=True):
            found[kind] = found.get(kind, 0.0) + spent
        return {kind: spent for kind, spent in found.items() if spent}

    def sent_bytes(self, first: int, last: int) -> int:
        """Return the bytes that the rank sends to others in entries from ``first`` up to ``last``."""
        sending = [
            self._entries[first + index] for index in np.flatnonzero(self._is_collective[first:last]).tolist()
        ]
        return sum(entry.num_bytes * entry.times for entry in sending)

    def _busiest_stream(self, durations: Seconds) -> int:
        """Return the stream that computes; side streams carry copies, and kernels on the way."""
        names, places = self._computing_streams
        if not len(names):
            return 0
        return int(names[np.bincount(places, weights=durations[self._is_kernel]).argmax()])

    @cached_property
    def _computing_streams(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The streams with kernels, and for each kernel the index of its stream among them."""
        return np.unique(self._streams[self._is_kernel], return_inverse=True)

    @cached_property
    def _side_streams(self) -> tuple[set[int], set[int]]:
        """The streams with copies, and those with collectives."""
        return set(self._streams[self._is_copy].tolist()), set(self._streams[self._is_collective].tolist())

    @cached_property
    def _cuts(self) -> list[int]:
        """Indices that cut the log into runs of kernels on one stream, replayed together, and other entries."""
        together = self._is_kernel[1:] & self._is_kernel[:-1] & (self._streams[1:] == self._streams[:-1])
        return [0, *(np.flatnonzero(~together) + 1).tolist(), len(self._entries)] if self._entries else []

    @cached_property
    def _program(self) -> Program:
        """The log in its rounds: runs of kernels, and every other entry by itself."""
        return program_of(self._entries, self._cuts[:-1])

    def _runs_at(self, rates: ClockRates) -> _KernelRuns:
        """Return the runs of kernels as a host with these rates issues them; most GPUs share one."""
        key = rates.operator_seconds, rates.launch_seconds, rates.triton_launch
        if key not in self._runs:
            bounds = [run for run in itertools.pairwise(self._cuts) if self._is_kernel[run[0]]]
            operators = 1 + rates.triton_launch * self._by_triton + self._python_operators
            host = rates.operator_seconds * operators + rates.launch_seconds * (self._launches - 1)
            kernels = np.flatnonzero(self._is_kernel)
            self._runs[key] = _KernelRuns.of(bounds, kernels, self._launches, host, rates.launch_seconds)
        return self._runs[key]


def host_link_rate(gpu: Gpu) -> float:
    """Return the bytes a second that copies between pinned host memory and a GPU reach, each way."""
    return pcie_rate(gpu) * gpu.rates.host_link


@dataclass(frozen=True, kw_only=True)
class _KernelRuns:
    """Runs of operators on one stream: when the host issues each kernel, wherever it runs.

    Args:
        bounds: for each run, its first entry and the one after its last.
        kernels: the entries of all runs.
        launches: for each entry, the number of its kernels.
        first_issued: for each entry, the time at which its first kernel is issued, from the moment the host begins the
            run.
        last_issued: the time for its last kernel, likewise.
    """

    bounds: list[tuple[int, int]]
    kernels: NDArray[np.int64]
    launches: Seconds
    first_issued: Seconds
    last_issued: Seconds

    @classmethod
    def of(
        cls,
        bounds: list[tuple[int, int]],
        kernels: NDArray[np.int64],
        launches: Seconds,
        host: Seconds,
        further: float,
    ) -> _KernelRuns:
        """Return the runs of a log, whose host takes seconds for each entry, and for each further launch of one."""
        last_issued = _within_runs(np.add, host, bounds)
        first_issued = last_issued - further * (launches - 1)
        return cls(
            bounds=bounds,
            kernels=kernels,
            launches=launches,
            first_issued=first_issued,
            last_issued=last_issued,
        )

    def done_and_held(self, durations: Seconds) -> tuple[Seconds, Seconds]:
        """Return, for each entry, the work up to its end, and how much later than this it ends because of the host.

        An operator starts when its first kernel is issued and the previous operator has ended. It ends no sooner than
        its last kernel, which has an equal share of its work, is issued and done.
        """
        done = _within_runs(np.add, durations, self.bounds)
        earliest_ends = np.maximum(
            self.first_issued + durations, self.last_issued + durations / self.launches
        )
        return done, _within_runs(np.maximum, earliest_ends - done, self.bounds)


def _within_runs(operation: np.ufunc, values: Seconds, bounds: list[tuple[int, int]]) -> Seconds:
    """Accumulate the values, in each run separately."""
    result = values.copy()
    for first, last in bounds:
        if last - first > 1:
            operation.accumulate(values[first:last], out=result[first:last])
    return result


class _Replay:
    """The state of host, streams, copy engines and events while a log is replayed.

    Args:
        program: the log as instructions.
        durations: seconds of each entry.
        runs: runs of its kernels.
        main: the stream whose stalls count, by its number in the program; -1: it has no entry.
        operator_seconds: seconds of the host for an operator.
        copying: the streams that carry copies, by number.
        exchanging: the other streams that carry collectives, and perhaps copies, by number.
    """

    def __init__(
        self,
        program: Program,
        durations: Seconds,
        runs: _KernelRuns,
        main: int,
        *,
        operator_seconds: float,
        copying: set[int],
        exchanging: set[int],
    ) -> None:
        # Lists: access to single numbers of an array is slow.
        self._starts, self._ends, self.copy_stalls, self.exchange_stalls = (
            [0.0] * len(durations) for _ in range(4)
        )
        self._durations = durations.tolist()
        self._runs = runs
        self._done, self._held = runs.done_and_held(durations)
        lasts = [last - 1 for _, last in runs.bounds]
        self._of_run = [column[lasts].tolist() for column in (self._done, self._held, runs.last_issued)]
        self._begun = [[0.0] * len(lasts) for _ in range(2)]  # times of host and of the stream, for each run
        self._main = main
        self._operator_seconds = operator_seconds
        self._stalls = dict.fromkeys(copying, self.copy_stalls)
        self._stalls.update(dict.fromkeys(exchanging, self.exchange_stalls))
        self._exchange_ready = 0.0
        self._stream_ready = [0.0] * len(program.streams)
        self._engines = DmaEngine(), DmaEngine()  # to the device, to the host
        # Of each event, the time, and the stream it was recorded on. CUDA lets pass one that was never recorded.
        self._reached, self._sources = [0.0] * program.num_events, [-1] * program.num_events
        self._go_through(program.whole, 0.0)

    def _go_through(self, stretch: LoggedRound, host: float) -> float:
        """Replay a stretch as often as it repeats.

        Millions of entries go through this loop, for each GPU: the frequent ones are dealt with on the spot, in local
        variables, which is several times as fast as a call for each.

        Args:
            stretch: the stretch.
            host: the time of the host.

        Returns:
            The time of the host afterwards.
        """
        starts, ends, durations = self._starts, self._ends, self._durations
        stream_ready, reached_of, sources = self._stream_ready, self._reached, self._sources
        (done, held, issued), (begun_on_host, begun_on_stream) = self._of_run, self._begun
        carry_to_device, carry_to_host = (engine.carry for engine in self._engines)
        main, stalls, operator_seconds = self._main, self._stalls, self._operator_seconds
        for repetition in range(stretch.times):
            if repetition:  # each event is now that of a round later
                for event, next_event in stretch.follow:
                    reached_of[event], sources[event] = reached_of[next_event], sources[next_event]
            for step, index, stream, other in stretch.instructions:
                if step == RECORD:
                    # An idle stream reaches the event when the host issues it. (Comparing is faster than ``max``.)
                    reached = stream_ready[stream]
                    if reached < host:
                        reached = host
                    reached_of[other], sources[other] = reached, stream
                    starts[index] = ends[index] = reached
                elif step in (COPY_TO_DEVICE, COPY_TO_HOST):
                    host += operator_seconds
                    ready = stream_ready[stream]
                    if ready < host:
                        ready = host
                    carry = carry_to_device if step == COPY_TO_DEVICE else carry_to_host
                    starts[index], end = carry(ready, durations[index], host)
                    ends[index] = stream_ready[stream] = end
                    if other:  # the host waits for its end
                        host = self._held_host(host, index, end, stream)
                elif step == WAIT:
                    ready, reached, source = stream_ready[stream], reached_of[other], sources[other]
                    # The stream that computes loses the time by which a copy or collective is late. What it would
                    # have waited for the host anyway is not the copy's.
                    if stream == main and source in stalls:
                        late = reached - (ready if ready > host else host)
                        if late > 0.0:
                            stalls[source][index] += late
                    starts[index] = ready
                    if reached > ready:
                        ready = reached
                    ends[index] = stream_ready[stream] = ready
                elif step == KERNELS:
                    ready = stream_ready[stream]
                    begun_on_host[other], begun_on_stream[other] = host, ready
                    # All work of the run follows what the stream did before, or as late as the host issues it.
                    until = host + held[other]
                    stream_ready[stream] = done[other] + (until if until > ready else ready)
                    host += issued[other]
                elif step == ROUND:
                    host = self._go_through(stretch.rounds[other], host)
                elif step == MARK:
                    starts[index] = ends[index] = host
                else:
                    host = self._pass_rare(step, index, stream, other, host)
        return host

    def _pass_rare(self, step: int, index: int, stream: int, other: int, host: float) -> float:
        """Replay an entry of a kind that a step has few of, and return the time of the host afterwards."""
        starts, ends = self._starts, self._ends
        starts[index] = host
        if step == SYNCHRONIZE:
            if other >= 0:
                host = self._held_host(host, index, self._reached[other], self._sources[other])
            else:
                for each, until in enumerate(self._stream_ready):
                    host = self._held_host(host, index, until, each)
        elif step == COLLECTIVE:
            host += self._operator_seconds
            # Those of one communicator run one after the other, in the order of their issue.
            starts[index] = start = max(host, self._stream_ready[stream], self._exchange_ready)
            end = self._stream_ready[stream] = self._exchange_ready = start + self._durations[index]
            ends[index] = end
            return host  # it only issues the collective
        else:
            assert step == HOST_COPY
            # The host itself copies. Streams run on what was issued before; the copy costs what it outlasts that.
            has_work_until = max(host, self._main_ready)
            host += self._durations[index]
            self.copy_stalls[index] += max(0.0, host - has_work_until)
        ends[index] = host
        return host

    @property
    def _main_ready(self) -> float:
        return self._stream_ready[self._main] if self._main >= 0 else 0.0

    def _held_host(self, host: float, index: int, until: float, source: int) -> float:
        """Let the host wait for a stream; the main stream may run out of work, unless the host waits for that one."""
        # While the main stream still has work, it loses nothing by the host's wait.
        if source != self._main and source in self._stalls:
            self._stalls[source][index] += max(0.0, until - max(host, self._main_ready))
        return max(host, until)

    def times(self) -> tuple[Seconds, Seconds]:
        """Return the start and end of each entry."""
        starts, ends = np.array(self._starts), np.array(self._ends)
        bounds = np.array(self._runs.bounds, dtype=np.int64).reshape(-1, 2)
        lengths = bounds[:, 1] - bounds[:, 0]
        host, ready = (np.repeat(np.array(begun), lengths) for begun in self._begun)
        kernels = self._runs.kernels
        ends[kernels] = self._done[kernels] + np.maximum(host + self._held[kernels], ready)
        starts[kernels[1:]] = ends[kernels[:-1]]
        starts[bounds[:, 0]] = self._begun[1]
        starts[kernels] = np.maximum(starts[kernels], host + self._runs.first_issued[kernels])
        return starts, ends


def _encode(words: list[T]) -> tuple[list[T], NDArray[np.int64]]:
    """Return the distinct words, and for each word its index among them."""
    places: dict[T, int] = {}
    codes = [places.setdefault(word, len(places)) for word in words]
    return list(places), np.array(codes, dtype=np.int64)
