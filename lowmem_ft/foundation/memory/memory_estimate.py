"""Memory and time that a run will need, as plain values, and as the JSON of ``lowmem-ft estimate --json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from lowmem_ft.foundation.memory.category import Category, Phase
from lowmem_ft.foundation.memory.playback import Playback
from lowmem_ft.foundation.memory.race import Race
from lowmem_ft.foundation.memory.step_work import StepWork
from lowmem_ft.foundation.memory.timeline import Timeline
from lowmem_ft.foundation.memory.uncertainty import Uncertainty, is_tight
from lowmem_ft.foundation.parallel_plan import ParallelPlan
from lowmem_ft.foundation.units import format_bytes

SCHEMA = 1

Verdict = Literal["fits", "may not fit", "does not fit"]
"""Verdict on an estimate: its whole range is within the limits, only a part of it, or no part."""

HOST_BOUND = 0.2
"""Share of a step in which the device waits for its host from which the host decides the seconds. Hosts that runs were
timed on issue operators up to three times as fast as each other (``foundation/catalog/clock_rates.json``): by the
reference host, a step that waits for a fifth of its time would take a tenth more or less on most of them.
"""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Number of a model's parameters; a tied one counts once.

    Args:
        name: name of the model.
        parameters: those of the language model.
        trainable_parameters: those of them that are trained.
        other_parameters: those of its checkpoint's other parts, which stay on the disk.
    """

    name: str
    parameters: int
    trainable_parameters: int
    other_parameters: int = 0


@dataclass(frozen=True, kw_only=True)
class DeviceLimit:
    """The device, and its memory as the driver reports it.

    Args:
        name: name of the device.
        memory_bytes: all of it; 0 if unknown.
        held_by_others_bytes: bytes that other processes and displays hold, if it is a device of this machine.
        context_is_estimate: whether the size of a process's CUDA context on such a device was never measured.
    """

    name: str
    memory_bytes: int
    held_by_others_bytes: int = 0
    context_is_estimate: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessRange:
    """Range of the process's peak, and the uncertainty behind it (see ``foundation/memory/uncertainty.py``).

    Args:
        low_bytes: the lower end.
        high_bytes: the upper end, which decides whether it fits; assumes that cached memory is given back if needed.
        uncertainty: the shares that make the range.
    """

    low_bytes: int
    high_bytes: int
    uncertainty: Uncertainty


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One optimizer step on the device's clock.

    Args:
        seconds: seconds of one step.
        tokens: tokens of one step, without padding.
        bound_by: the bottleneck: ``compute``, ``memory bandwidth``, ``kernel launches``, ``host copies``,
            ``communication``, or on a CPU ``calls of operators``.
        sent_bytes: bytes that the process sends to others in one step.
        seconds_share: relative distance of a run's seconds from these, either way
            (``foundation/catalog/clock_rates.py``); 0: not known.
        unlike_measured: kinds of work of which the step has so much more than any timed run behind the range that they
            widen it.
        by_operator: seconds of the operators that compute, by name; copies and exchanges are not among them.
        by_kind: shares of the seconds by kind of work, of the kinds that runs were compared for.
        host_share: share of the seconds in which the device waits for the host to issue its next kernel.
        host_range: what the fastest and the slowest known host take of these waits, as shares of the assumed host's.
        least_share: share of the seconds that are left where all that torch.compile may fuse takes no time; 1: the
            program compiles nothing.
    """

    seconds: float
    tokens: int
    bound_by: str
    sent_bytes: int = 0
    seconds_share: float = 0.0
    unlike_measured: tuple[str, ...] = field(default=(), compare=False)
    by_operator: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)
    by_kind: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)
    host_share: float = field(default=0.0, compare=False)
    host_range: tuple[float, float] = field(default=(1.0, 1.0), compare=False)
    least_share: float = field(default=1.0, compare=False)

    @property
    def is_host_bound(self) -> bool:
        """True if the host decides its seconds: the device waits for it for at least :data:`HOST_BOUND` of them."""
        return self.host_share >= HOST_BOUND

    @property
    def low_seconds(self) -> float:
        """The lower end of the range of seconds.

        The fastest known host and a clock that is off by its share are independent of each other.
        """
        return self.seconds * self.least_share / self._factor(self.host_range[0])

    @property
    def high_seconds(self) -> float:
        """The upper end of the range of seconds, likewise with the slowest known host."""
        return self.seconds * self._factor(self.host_range[1])

    def _factor(self, slower: float) -> float:
        on_host = 1 + self.host_share * (slower - 1)
        return math.exp(math.hypot(math.log(on_host), math.log1p(self.seconds_share)))

    @property
    def tokens_per_second(self) -> float:
        """Training tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of a run, whose first one the estimate describes.

    Args:
        strategy: what they share, see ``distributed.strategy``.
        num_processes: number on all machines together, one per device.
        num_machines: number of machines.
        link: the link over which they exchange data, in words.
        link_bytes_per_second: bytes per second that each of them sends.
        ideal_sent_bytes: bytes sent in a step that gathered the weights twice and scattered their gradients once, in
            the weights' type; 0: the weights are not sharded.
        last_peak_bytes: peak of the last process, which may have fewer rows, as
            :attr:`MemoryEstimate.process_peak_bytes`.
        last_host_bytes: host memory of each process but the first of a machine; 0: as much as the first.
    """

    strategy: str
    num_processes: int
    num_machines: int = 1
    link: str = ""
    link_bytes_per_second: float = 0.0
    ideal_sent_bytes: int = 0
    last_peak_bytes: int = 0
    last_host_bytes: int = 0

    @property
    def plan(self) -> ParallelPlan:
        """The same as a plan, which says what they share."""
        return ParallelPlan(
            strategy=self.strategy, num_processes=self.num_processes, num_machines=self.num_machines
        )

    @property
    def per_machine(self) -> int:
        """Number of processes on each machine."""
        return self.plan.per_machine


@dataclass(frozen=True, kw_only=True)
class BudgetVerdict:
    """Bytes that may be used: the budget if one is set, else all there is; None: no limit."""

    device_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory and the time that a recipe will need on one device. All sizes are bytes, all peaks over the whole run.

    Args:
        model: its name and size.
        gpu: the device.
        allocated_peak_bytes: bytes of tensors, as ``torch.cuda.max_memory_allocated`` counts.
        reserved_peak_bytes: bytes of the caching allocator's segments, as ``torch.cuda.max_memory_reserved`` counts.
        process_peak_bytes: bytes of the process, as ``nvidia-smi`` shows: reserved, CUDA context, libraries.
        paged_peak_bytes: the part of that which is paged optimizer state, outside the allocator; not in the JSON.
        process_range: range of that number; None: not known.
        fits_at_low_end: whether it would fit at the lower end of the range, if it does not fit.
        host_peak_bytes: host memory of the process, without pages of files (``foundation/system/host_memory.py``).
        host_pinned_bytes: the pinned part of it, at its own peak.
        host_by_part_at_peak: parts of the host's peak: tensors by category, and ``process``, ``heap`` (on a CPU),
            ``loading`` and ``saving``; they sum to it.
        disk_peak_bytes: bytes of files that are mapped as memory (``offload.folder``); they are resident only while
            there is room, and not counted as such.
        balanced_peak_bytes: ``process_peak_bytes`` of a mixture whose experts all compute as many rows; the other
            numbers are those of the routing that needs most, except for the time. None: the routing decides less than
            1% of it.
        by_category_at_peak: allocated bytes at the moment of the allocated peak; they sum to it.
        by_phase: allocated peak of each phase.
        peak_phase: phase of the allocated peak.
        peak_module: module of the allocation that made the peak; empty if outside any.
        step: time of a step; None if the device has no timing model, as a CPU on which no step was timed.
        cpu_work: what a step asks of a processor; None on a GPU; not in the JSON.
        processes: the processes whose first one is described here; None: there is only one.
        budget: the limits behind ``fits``.
        fits: whether no allocation fails, the upper end of the range stays within the device's budget, and the host's
            peak within its own.
        choices: decisions for this device, with reasons, such as the attention kernel.
        not_modelled: what the numbers leave out.
        versions: versions of the libraries that the trace ran with.
        trace_seconds: seconds that the estimate took.
        timeline: every allocation of the trace; not in the JSON.
        playback: the timeline as the GPU plays it; None on a CPU; not in the JSON.
        races: races found by a virtual GPU with ``check_streams``; not in the JSON.
    """

    model: ModelSize
    gpu: DeviceLimit
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    process_peak_bytes: int
    host_peak_bytes: int
    host_pinned_bytes: int
    by_category_at_peak: Mapping[Category, int]
    by_phase: Mapping[Phase, int]
    peak_phase: Phase
    peak_module: str
    step: StepTime | None
    budget: BudgetVerdict
    fits: bool
    paged_peak_bytes: int = 0
    process_range: ProcessRange | None = None
    fits_at_low_end: bool = False
    processes: Processes | None = None
    host_by_part_at_peak: Mapping[str, int] = field(default_factory=dict)
    disk_peak_bytes: int = 0
    balanced_peak_bytes: int | None = None
    choices: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    trace_seconds: float = 0.0
    timeline: Timeline = field(default_factory=Timeline, repr=False, compare=False)
    playback: Playback | None = field(default=None, repr=False, compare=False)
    cpu_work: StepWork | None = None
    races: tuple[Race, ...] = ()

    @property
    def headroom_bytes(self) -> int | None:
        """Bytes of the device's budget left unused; negative if it is exceeded; None without a limit."""
        limit = self.budget.device_bytes
        return None if limit is None else limit - self.process_peak_bytes

    @property
    def devices(self) -> str:
        """Name and number of the devices: ``rtx-4090``, ``8 x rtx-4090``."""
        return (
            self.gpu.name if self.processes is None else f"{self.processes.num_processes} x {self.gpu.name}"
        )

    @property
    def machine_host_bytes(self) -> int:
        """Host memory of all processes of a machine together."""
        each = self.process_peak_bytes if self.is_of_cpu else self.host_peak_bytes
        if self.processes is None:
            return each
        return each + (self.processes.per_machine - 1) * (self.processes.last_host_bytes or each)

    @property
    def is_of_cpu(self) -> bool:
        """True for a machine without a GPU: no caching allocator, and perhaps no known limit."""
        return self.gpu.name.startswith("cpu")

    @property
    def process_high_bytes(self) -> int:
        """The upper end of the process's range; the figure itself if there is no range."""
        return self.process_peak_bytes if self.process_range is None else self.process_range.high_bytes

    @property
    def verdict(self) -> Verdict:
        """Verdict in words; "may not fit" if a limit is within the range."""
        if self.fits:
            return "fits"
        return "may not fit" if self.fits_at_low_end else "does not fit"

    @property
    def tight(self) -> bool:
        """True if it fits with so little to spare that it may not (see ``foundation/memory/uncertainty.py``)."""
        budget = self.budget
        return self.fits and (
            is_tight(self.process_peak_bytes, budget.device_bytes)
            or is_tight(self.host_peak_bytes, budget.host_bytes)
        )

    def __str__(self) -> str:
        """Return the verdict in a few lines; ``lowmem_ft.reports.estimate_table`` shows all of it."""
        lines = [
            f"{self.devices}: {self._verdict()}",
            f"The process takes {format_bytes(self.process_peak_bytes)}: {format_bytes(self.reserved_peak_bytes)} "
            f"reserved, of which {format_bytes(self.allocated_peak_bytes)} allocated at the peak, in {self.peak_phase} "
            f"at {self.peak_module or 'no module'}.",
            "At the peak: "
            + ", ".join(
                f"{category} {format_bytes(size)}"
                for category, size in self.by_category_at_peak.items()
                if size
            ),
        ]
        if self.step is not None:
            lines.append(f"{self.step.seconds:.3g} s a step, bound by {self.step.bound_by}.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        spare = self.headroom_bytes
        if spare is None:
            return "there is no limit to compare it with."
        if self.fits:
            how = "fits tightly" if self.tight else "fits"
            host = format_bytes(self.host_peak_bytes)
            return f"{how}, {format_bytes(spare)} to spare, and needs {host} of host memory."
        missing = f", {format_bytes(-spare)} are missing" if spare < 0 else ""
        return f"{self.verdict}{missing}."

    def without_timeline(self) -> MemoryEstimate:
        """Return the estimate without its single allocations, which are a lot of data to keep or to hand over."""
        return replace(self, timeline=Timeline(), playback=None)

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON types, by the names of the published schema."""
        step = self.step and {
            "seconds": self.step.seconds,
            "low_seconds": self.step.low_seconds,
            "high_seconds": self.step.high_seconds,
            "tokens": self.step.tokens,
            "tokens_per_second": self.step.tokens_per_second,
            "bound_by": self.step.bound_by,
            "host_share": self.step.host_share,
            "is_host_bound": self.step.is_host_bound,
            "unlike_measured": [*self.step.unlike_measured],
        }
        process_range = self.process_range
        processes = self.processes and {
            **asdict(self.processes),
            "sent_bytes_per_step": 0 if self.step is None else self.step.sent_bytes,
            "host_bytes_per_machine": self.machine_host_bytes,
        }
        return {
            "schema": SCHEMA,
            "model": asdict(self.model),
            "gpu": asdict(self.gpu),
            "device": {
                "allocated_peak_bytes": self.allocated_peak_bytes,
                "reserved_peak_bytes": self.reserved_peak_bytes,
                "process_peak_bytes": self.process_peak_bytes,
                "process_low_bytes": process_range and process_range.low_bytes,
                "process_high_bytes": process_range and process_range.high_bytes,
                "balanced_peak_bytes": self.balanced_peak_bytes,
            },
            "uncertainty": process_range and asdict(process_range.uncertainty),
            "host": {
                "peak_bytes": self.host_peak_bytes,
                "pinned_bytes": self.host_pinned_bytes,
                "disk_bytes": self.disk_peak_bytes,
                "by_part_at_peak": dict(self.host_by_part_at_peak),
            },
            "by_category_at_peak": dict(self.by_category_at_peak),
            "by_phase": dict(self.by_phase),
            "peak_at": {"phase": self.peak_phase, "module": self.peak_module},
            "step": step,
            "processes": processes,
            "budget": {**asdict(self.budget), "headroom_bytes": self.headroom_bytes},
            "fits": self.fits,
            "verdict": self.verdict,
            "tight": self.tight,
            "choices": list(self.choices),
            "not_modelled": list(self.not_modelled),
            "versions": dict(self.versions),
            "trace_seconds": self.trace_seconds,
        }
