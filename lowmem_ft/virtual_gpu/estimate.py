"""A trace in numbers: its memory through the caching allocator of a GPU, its time on that GPU's clock."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from lowmem_ft.catalog.gpu import Gpu
from lowmem_ft.memory.allocator_config import AllocatorConfig
from lowmem_ft.memory.analysis import allocation_at, categories_at, peak_by_phase
from lowmem_ft.memory.category import Phase
from lowmem_ft.memory.estimate import BudgetVerdict, DeviceLimit, MemoryEstimate, StepTime
from lowmem_ft.memory.timeline import Timeline
from lowmem_ft.virtual_gpu.replays import Replays
from lowmem_ft.virtual_gpu.trace import Trace

NOT_MODELLED = (
    "other processes and a display on the GPU",
    "kernels that torch.compile would fuse",
    "scratch of kernels below 1 MiB",
)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a trace does not contain and an estimate needs.

    Args:
        outside_bytes: device memory outside torch's allocator, by what holds it.
        host_base_bytes: host memory of the process beside what the trace shows.
        tokens_per_step: tokens of one optimizer step, without padding; 0 if unknown.
        micro_batches_per_step: as the run would have them; None: as traced.
        allocator: settings of the caching allocator.
        allowed_bytes: the most that the caching allocator lets itself hold, as
            ``torch.cuda.set_per_process_memory_fraction`` sets it; None: all there is.
        not_modelled: what is left out, beside what always is.
    """

    outside_bytes: Mapping[str, int] = field(default_factory=dict)
    host_base_bytes: int = 0
    tokens_per_step: int = 0
    micro_batches_per_step: int | None = None
    allocator: AllocatorConfig = field(default_factory=lambda: allocator_config_of_environment())
    allowed_bytes: int | None = None
    not_modelled: tuple[str, ...] = ()


def allocator_config_of_environment() -> AllocatorConfig:
    """The settings that torch would read in this environment.

    Raises:
        UserError: if they cannot be read.
    """
    # torch reads the older name first, even where it is empty.
    text = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))
    return AllocatorConfig.parse(text)


def estimate_on_gpu(
    trace: Trace,
    gpu: Gpu,
    budget: BudgetVerdict,
    surroundings: Surroundings,
    trace_seconds: float = 0.0,
    replays: Replays | None = None,
) -> MemoryEstimate:
    """What a traced program needs on a GPU.

    The allocator may take all it wants. Only if that is more than there is, or than it allows itself, and the tensors
    alone are not, is it replayed once more within those limits, where it has to give cached memory back and try again,
    as torch does before it fails.

    Args:
        trace: of a GPU of this kind.
        gpu: the GPU.
        budget: what the process is judged against; the device's is at most its memory.
        surroundings: what the trace does not contain.
        trace_seconds: how long tracing took, for the record.
        replays: those of the trace by the same allocator, to share them between GPUs; None: fresh ones.

    Returns:
        The estimate. It fits if no request fails and the process stays within the budget. Of a program that runs out of
        memory, what it would have needed.
    """
    outside = sum(surroundings.outside_bytes.values())
    limit = budget.device_bytes or gpu.memory_bytes
    replays = replays or Replays(trace, surroundings.allocator)
    choices = list(trace.choices)
    reserved_peak = replays.reserved_peak_bytes
    capacity, allowed = gpu.memory_bytes - outside, surroundings.allowed_bytes
    most = capacity if allowed is None else min(capacity, allowed)
    runs = reserved_peak <= most
    if not runs and replays.peak_live_bytes("device") <= most:
        capped = replays.within(capacity, allowed)
        if capped.out_of_memory is None:
            runs, reserved_peak = True, capped.peak_reserved_bytes
            choices.append(
                f"the allocator has to empty its cache {capped.num_retries} times to stay within the limit, which "
                "costs time; PYTORCH_ALLOC_CONF=expandable_segments:True needs less"
            )
    # Managed memory moves to the host where the device is full: it takes what is left.
    managed_peak = replays.peak_live_bytes("managed")
    process_peak = min(reserved_peak + outside + managed_peak, max(limit, reserved_peak + outside))
    return _estimate(
        trace,
        Device(gpu.name, gpu.memory_bytes, reserved_peak, process_peak),
        replays.unlimited.allocated_bytes,
        replays.unlimited.block_bytes,
        replays.unlimited.peak_allocated_at,
        budget=budget,
        fits=runs and process_peak <= limit,
        host_peak=surroundings.host_base_bytes + replays.peak_live_bytes("host", "pinned"),
        step=step_time(replays, gpu, surroundings),
        choices=tuple(choices),
        not_modelled=(*NOT_MODELLED, *surroundings.not_modelled),
        trace_seconds=trace_seconds,
    )


def estimate_on_cpu(
    trace: Trace, name: str, budget: BudgetVerdict, surroundings: Surroundings, trace_seconds: float = 0.0
) -> MemoryEstimate:
    """What a traced program needs on a machine without a GPU: its tensors, exactly, in host memory.

    Args:
        trace: of a machine without a GPU.
        name: of the machine's processor.
        budget: the limits.
        surroundings: what the trace does not contain.
        trace_seconds: how long tracing took, for the record.

    Returns:
        The estimate; reserved bytes are those allocated, as there is no caching allocator, and there is no clock.
    """
    allocated = list(trace.timeline.live_bytes())
    peak_at = max(range(len(allocated)), key=allocated.__getitem__, default=None)
    peak = 0 if peak_at is None else allocated[peak_at]
    process = peak + surroundings.host_base_bytes
    limits = [limit for limit in (budget.device_bytes, budget.host_bytes) if limit is not None]
    return _estimate(
        trace,
        Device(name, budget.device_bytes or 0, peak, process),
        allocated,
        [allocation.size_bytes for allocation in trace.timeline.allocations],
        peak_at,
        budget=budget,
        fits=process <= min(limits, default=process),
        host_peak=process,
        step=None,
        choices=trace.choices,
        not_modelled=("time on a CPU", "scratch inside the CPU's kernels", *surroundings.not_modelled),
        trace_seconds=trace_seconds,
    )


def step_time(replays: Replays, gpu: Gpu, surroundings: Surroundings) -> StepTime | None:
    """The time of one optimizer step once everything runs; None if the trace has no step."""
    trace = replays.trace
    step_ends = trace.step_ends
    if not step_ends:
        return None
    times = replays.clock.times_on(gpu)
    first, last = [0, *step_ends][-2:]
    step = times.between(first, last)
    seconds = step.seconds
    traced = [bounds for bounds in trace.micro_batches if first <= bounds[0] < last]
    wanted = surroundings.micro_batches_per_step
    if traced and wanted is not None:
        seconds += (wanted - len(traced)) * times.between(*traced[-1]).seconds
    return StepTime(seconds=seconds, tokens=surroundings.tokens_per_step, bound_by=step.bound_by)


@dataclass(frozen=True)
class Device:
    """A device and the peaks on it that tensors alone do not tell."""

    name: str
    memory_bytes: int
    reserved_peak_bytes: int
    process_peak_bytes: int


def _estimate(
    trace: Trace,
    device: Device,
    allocated: Sequence[int],
    sizes: Sequence[int],
    peak_at: int | None,
    *,
    budget: BudgetVerdict,
    fits: bool,
    host_peak: int,
    step: StepTime | None,
    choices: tuple[str, ...],
    not_modelled: tuple[str, ...],
    trace_seconds: float,
) -> MemoryEstimate:
    timeline = trace.timeline
    at_peak = None if peak_at is None else allocation_at(timeline, peak_at)
    phase: Phase = "load" if at_peak is None else at_peak.phase
    if trace.assumed_largest:
        choices = (*choices, f"taken at their largest, as values decide: {', '.join(trace.assumed_largest)}")
    return MemoryEstimate(
        model=trace.model,
        gpu=DeviceLimit(name=device.name, memory_bytes=device.memory_bytes),
        allocated_peak_bytes=0 if peak_at is None else allocated[peak_at],
        reserved_peak_bytes=device.reserved_peak_bytes,
        process_peak_bytes=device.process_peak_bytes,
        host_peak_bytes=host_peak,
        host_pinned_bytes=_peak(timeline, ("pinned",)),
        by_category_at_peak={} if peak_at is None else categories_at(timeline, peak_at, sizes),
        by_phase=peak_by_phase(timeline, allocated),
        peak_phase=phase,
        peak_module="" if at_peak is None else at_peak.module,
        step=step,
        budget=budget,
        fits=fits and (budget.host_bytes is None or host_peak <= budget.host_bytes),
        disk_peak_bytes=_peak(timeline, ("disk",)),
        choices=choices,
        not_modelled=not_modelled,
        versions=_versions(),
        trace_seconds=trace_seconds,
        timeline=timeline,
    )


def _peak(timeline: Timeline, places: tuple[str, ...]) -> int:
    return max(timeline.live_bytes(places), default=0)  # type: ignore[arg-type]


def _versions() -> dict[str, str]:
    import transformers

    import lowmem_ft

    return {
        "lowmem_ft": lowmem_ft.__version__,
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
