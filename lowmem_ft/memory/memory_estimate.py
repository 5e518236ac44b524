"""What a run will need, as plain values, and as the JSON that ``lowmem-ft estimate --json`` prints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.memory.category import Category, Phase
from lowmem_ft.memory.race import Race
from lowmem_ft.memory.timeline import Timeline
from lowmem_ft.memory.uncertainty import Uncertainty, is_tight

SCHEMA = 1

Verdict = Literal["fits", "may not fit", "does not fit"]
"""Of an estimate: its whole range is within the limits, a part of it is, or none."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """How many parameters a model has; a tied one counts once."""

    name: str
    parameters: int
    trainable_parameters: int


@dataclass(frozen=True, kw_only=True)
class DeviceLimit:
    """The device, and its memory as the driver reports it.

    Args:
        name: of the device.
        memory_bytes: all of it; 0 if unknown.
        held_by_others_bytes: what other processes and displays hold, where it is this machine's own.
        context_is_estimate: whether nobody has read what a process's CUDA context takes on such a device.
    """

    name: str
    memory_bytes: int
    held_by_others_bytes: int = 0
    context_is_estimate: bool = False


@dataclass(frozen=True, kw_only=True)
class ProcessRange:
    """Where the peak of the process will lie, and the uncertainty that says so (see ``memory/uncertainty.py``).

    Args:
        low_bytes: the lower end.
        high_bytes: the upper end, which decides whether it fits; cached memory has been given back where it has to be.
        uncertainty: the shares that make the range.
    """

    low_bytes: int
    high_bytes: int
    uncertainty: Uncertainty


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One optimizer step on the device's clock.

    Args:
        seconds: of one step.
        tokens: of one step, without padding.
        bound_by: what would make it faster: ``compute``, ``memory bandwidth``, ``kernel launches``, ``host copies`` or
            ``communication``.
        sent_bytes: that the process sends to others.
    """

    seconds: float
    tokens: int
    bound_by: str
    sent_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on in a second."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class Processes:
    """The processes of which an estimate shows the first.

    Args:
        strategy: what they share, see ``distributed.strategy``.
        num_processes: on all machines together, one a device.
        num_machines: that they are on.
        link: what they exchange data over, in words.
        link_bytes_per_second: that each of them sends.
        ideal_sent_bytes: of a step in which the weights were gathered twice and their gradients scattered once, in the
            weights' type; 0: they are not cut.
        last_peak_bytes: of the last process, which may have fewer rows, as :attr:`MemoryEstimate.process_peak_bytes`.
    """

    strategy: str
    num_processes: int
    num_machines: int = 1
    link: str = ""
    link_bytes_per_second: float = 0.0
    ideal_sent_bytes: int = 0
    last_peak_bytes: int = 0

    @property
    def per_machine(self) -> int:
        """How many there are on each machine."""
        return self.num_processes // self.num_machines


@dataclass(frozen=True, kw_only=True)
class BudgetVerdict:
    """What may be used: the budget, where one is set, else all there is; None: no limit."""

    device_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The memory and the time that a recipe will need on one device. All sizes are bytes, all peaks over the whole run.

    Args:
        model: its name and size.
        gpu: the device.
        allocated_peak_bytes: of tensors, as ``torch.cuda.max_memory_allocated`` counts.
        reserved_peak_bytes: of the caching allocator's segments, as ``torch.cuda.max_memory_reserved`` counts.
        process_peak_bytes: of the process, as ``nvidia-smi`` shows: reserved, CUDA context, libraries.
        process_range: where that will lie; None: not known.
        fits_at_low_end: whether it fits if all is as much smaller as it may be, where it does not fit.
        host_peak_bytes: host memory of the process, without pages of files (``system/process_memory.py``).
        host_pinned_bytes: the part of it that is pinned, at its own peak.
        host_by_part_at_peak: what the host's peak is made of, by category, and by ``process``, ``heap`` (on a
            CPU), ``loading`` and ``saving`` beside the tensors; they sum to it.
        disk_peak_bytes: of files that are mapped as memory (``offload.folder``); they are resident only while there is
            room, and not counted as such.
        by_category_at_peak: allocated bytes at the moment of the allocated peak; they sum to it.
        by_phase: allocated peak of each phase.
        peak_phase: phase of the allocated peak.
        peak_module: module of the allocation that made the peak; empty if outside any.
        step: time of a step; None where there is no clock, as on a CPU.
        processes: those of which all this is the first one's; None: there is one.
        budget: what it is judged against.
        fits: whether no allocation fails, the upper end of the range stays within the device's budget, and the host's
            peak within its own.
        choices: what was decided for this device, with reasons, such as the attention kernel.
        not_modelled: what the numbers leave out.
        versions: of the libraries the trace ran with.
        trace_seconds: how long the estimate took.
        timeline: every allocation of the trace; not in the JSON.
        races: what a virtual GPU with ``check_streams`` has found; not in the JSON.
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
    process_range: ProcessRange | None = None
    fits_at_low_end: bool = False
    processes: Processes | None = None
    host_by_part_at_peak: Mapping[str, int] = field(default_factory=dict)
    disk_peak_bytes: int = 0
    choices: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    trace_seconds: float = 0.0
    timeline: Timeline = field(default_factory=Timeline, repr=False, compare=False)
    races: tuple[Race, ...] = ()

    @property
    def headroom_bytes(self) -> int | None:
        """What the device's budget leaves unused; negative if it is exceeded; None without a limit."""
        limit = self.budget.device_bytes
        return None if limit is None else limit - self.process_peak_bytes

    @property
    def devices(self) -> str:
        """What it is for, in words: ``rtx-4090``, ``8 x rtx-4090``."""
        return (
            self.gpu.name if self.processes is None else f"{self.processes.num_processes} x {self.gpu.name}"
        )

    @property
    def machine_host_bytes(self) -> int:
        """Host memory of all processes of a machine together."""
        each = self.process_peak_bytes if self.is_of_cpu else self.host_peak_bytes
        return each * (1 if self.processes is None else self.processes.per_machine)

    @property
    def is_of_cpu(self) -> bool:
        """Whether it is for a machine without a GPU: no caching allocator, and perhaps no known limit."""
        return self.gpu.name.startswith("cpu")

    @property
    def process_high_bytes(self) -> int:
        """The upper end of the process's range; the figure itself where there is none."""
        return self.process_peak_bytes if self.process_range is None else self.process_range.high_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether it fits; it may not where a limit is within the range."""
        if self.fits:
            return "fits"
        return "may not fit" if self.fits_at_low_end else "does not fit"

    @property
    def tight(self) -> bool:
        """Whether it fits with so little to spare that it may not in practice (see ``memory/uncertainty.py``)."""
        budget = self.budget
        return self.fits and (
            is_tight(self.process_peak_bytes, budget.device_bytes)
            or is_tight(self.host_peak_bytes, budget.host_bytes)
        )

    def __str__(self) -> str:
        """The verdict in a few lines; ``lowmem_ft.reports.estimate_table`` shows all of it."""
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
            return "no limit to judge by."
        if self.fits:
            how = "fits tightly" if self.tight else "fits"
            host = format_bytes(self.host_peak_bytes)
            return f"{how}, {format_bytes(spare)} to spare, and needs {host} of host memory."
        missing = f", {format_bytes(-spare)} are missing" if spare < 0 else ""
        return f"{self.verdict}{missing}."

    def to_json(self) -> dict[str, Any]:
        """The estimate as JSON types, by the names of the published schema."""
        step = self.step and {
            "seconds": self.step.seconds,
            "tokens": self.step.tokens,
            "tokens_per_second": self.step.tokens_per_second,
            "bound_by": self.step.bound_by,
        }
        process_range = self.process_range
        processes = self.processes and {
            **asdict(self.processes),
            "sent_bytes_per_step": 0 if self.step is None else self.step.sent_bytes,
            "host_bytes_per_machine": self.machine_host_bytes,
        }
        return {
            "schema": SCHEMA,
            "model": {
                "name": self.model.name,
                "parameters": self.model.parameters,
                "trainable_parameters": self.model.trainable_parameters,
            },
            "gpu": {
                "name": self.gpu.name,
                "memory_bytes": self.gpu.memory_bytes,
                "held_by_others_bytes": self.gpu.held_by_others_bytes,
                "context_is_estimate": self.gpu.context_is_estimate,
            },
            "device": {
                "allocated_peak_bytes": self.allocated_peak_bytes,
                "reserved_peak_bytes": self.reserved_peak_bytes,
                "process_peak_bytes": self.process_peak_bytes,
                "process_low_bytes": process_range and process_range.low_bytes,
                "process_high_bytes": process_range and process_range.high_bytes,
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
            "budget": {
                "device_bytes": self.budget.device_bytes,
                "host_bytes": self.budget.host_bytes,
                "headroom_bytes": self.headroom_bytes,
            },
            "fits": self.fits,
            "verdict": self.verdict,
            "tight": self.tight,
            "choices": list(self.choices),
            "not_modelled": list(self.not_modelled),
            "versions": dict(self.versions),
            "trace_seconds": self.trace_seconds,
        }
