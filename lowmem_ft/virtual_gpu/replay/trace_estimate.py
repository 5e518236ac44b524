"""Estimates from a trace: its memory through the caching allocator of a GPU, its time on that GPU's clock."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import lowmem_ft
from lowmem_ft.foundation.allocator_setting import SETTING_OF_RUNS, allocator_setting
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.memory.allocator.allocator_config import AllocatorConfig
from lowmem_ft.foundation.memory.cpu_step_time import NO_SECONDS
from lowmem_ft.foundation.memory.memory_estimate import (
    BudgetVerdict,
    DeviceLimit,
    MemoryEstimate,
    Processes,
    ProcessRange,
    StepTime,
)
from lowmem_ft.foundation.memory.playback import Playback, StepClock
from lowmem_ft.foundation.memory.timeline import Allocation
from lowmem_ft.foundation.memory.uncertainty import (
    HEAP_SHARE,
    LARGEST_IN_HEAP_BYTES,
    uncertainty_on_cpu,
    uncertainty_on_gpu,
)
from lowmem_ft.foundation.upstream.tested import installed_version
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.replay.compiled_range import with_compiled_code
from lowmem_ft.virtual_gpu.replay.host_peak import HostOutside
from lowmem_ft.virtual_gpu.replay.process_room import Held, ProcessRoom
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays, TensorPeaks
from lowmem_ft.virtual_gpu.replay.timing.clock import Span, kinds_of_work
from lowmem_ft.virtual_gpu.replay.timing.cpu_work import cpu_work
from lowmem_ft.virtual_gpu.replay.timing.links import link_between
from lowmem_ft.virtual_gpu.replay.timing.memory_event_times import step_clock

OTHERS = "other processes and a display on the GPU"
NOT_MODELLED = ("workspaces of kernels below 1 MiB",)


@dataclass(frozen=True, kw_only=True)
class EstimateContext:
    """Facts that a trace does not contain and an estimate needs.

    Args:
        outside_bytes: device memory outside torch's allocator, by what holds it.
        host: host memory of the process in addition to what the trace shows.
        tokens_per_step: tokens of one optimizer step, without padding; 0 if unknown.
        micro_batches_per_step: number in the run; None: as traced.
        share_like_last: share of the run's steps that are like the last one traced; the others are like the one before.
        allocator: settings of the caching allocator.
        largest_in_heap_bytes: largest block in the heap without a GPU; the C library requests larger ones from the
            system one by one.
        heap_share: bytes of freed tensors that the heap keeps, as a share of those of live tensors in it.
        fragments_bytes: the most that the caching allocator may hold in addition, in gaps that a trace does not make.
        allowed_bytes: the most that the caching allocator lets itself hold, as
            ``torch.cuda.set_per_process_memory_fraction`` sets it; None: the whole memory.
        processes: the ranks, of which the trace is the first; None: there is one process.
        sends_at_the_end: whether ranks exchange nothing in the micro-batches before a step's last one.
        is_compiled: whether the program calls what it has compiled by ``torch.compile``.
        not_modelled: parts that this estimate leaves out, in addition to those that every estimate does.
    """

    outside_bytes: Mapping[str, int] = field(default_factory=dict)
    host: HostOutside = field(default_factory=HostOutside)
    tokens_per_step: int = 0
    micro_batches_per_step: int | None = None
    share_like_last: float = 1.0
    allocator: AllocatorConfig = field(default_factory=lambda: allocator_config_of_environment())
    largest_in_heap_bytes: int = LARGEST_IN_HEAP_BYTES
    heap_share: float = HEAP_SHARE
    fragments_bytes: int = 0
    allowed_bytes: int | None = None
    processes: Processes | None = None
    sends_at_the_end: bool = False
    is_compiled: bool = False
    not_modelled: tuple[str, ...] = ()


def allocator_config_of_environment() -> AllocatorConfig:
    """Return the settings that torch would read in this environment.

    Raises:
        UserError: if they cannot be read.
    """
    return AllocatorConfig.parse(allocator_setting())


def allocator_config_of_runs(gpu: Gpu | None) -> AllocatorConfig:
    """Return the settings for a recipe, whose run has one of its own where the environment has none.

    Args:
        gpu: the GPU it would run on; None: a processor, whose memory no such allocator manages.

    Raises:
        UserError: if they cannot be read.
    """
    return AllocatorConfig.parse(
        allocator_setting(SETTING_OF_RUNS if gpu is None or gpu.segments_grow else "")
    )


def estimate_on_gpu(
    trace: Trace,
    gpu: Gpu,
    budget: BudgetVerdict,
    context: EstimateContext,
    trace_seconds: float = 0.0,
    replays: Replays | None = None,
) -> MemoryEstimate:
    """Estimate what a traced program needs on a GPU.

    The allocator may take as much as it wants. If that is more than the GPU has, or than the allocator may hold, and
    the tensors alone fit, the trace is replayed once more within those limits, where the allocator has to give cached
    memory back and try again, as torch does before it fails.

    Args:
        trace: the trace of a program on a GPU of this kind.
        gpu: the GPU.
        budget: the limits for the process; the device's is at most its memory.
        context: facts that the trace does not contain.
        trace_seconds: seconds that tracing took, for the record.
        replays: those of the trace by the same allocator, to share them between GPUs; None: new ones.

    Returns:
        The estimate. It fits if no request fails and the upper end of the process's range stays within the budget (see
        ``foundation/memory/uncertainty.py``). For a program that runs out of memory, it tells what the program would
        have needed.
    """
    replays = replays or Replays(trace, context.allocator)
    room = ProcessRoom(
        replays=replays,
        available_bytes=gpu.available_bytes,
        outside_bytes=sum(context.outside_bytes.values()),
        allowed_bytes=context.allowed_bytes,
        limit_bytes=min(budget.device_bytes or gpu.available_bytes, gpu.available_bytes),
    )
    held = room.held()
    reserved_peak = replays.reserved_peak_bytes if held is None else held.peak_bytes
    process = room.process_peak(reserved_peak + room.outside_bytes)
    uncertainty = uncertainty_on_gpu(
        is_quantized=trace.is_quantized, context_is_estimate=gpu.context_is_estimate
    )
    highest = room.end_of_range(uncertainty, upper=True)
    if highest is not None:
        highest += trace.uncertain_bytes
    process_range = room.process_range(reserved_peak, highest, uncertainty, context.fragments_bytes)
    fits = None not in (held, highest) and process_range.high_bytes <= room.limit_bytes
    lowest = None if fits else room.end_of_range(uncertainty, upper=False)
    fits_at_low_end = fits or (lowest is not None and room.process_peak(lowest) <= room.limit_bytes)
    step, clock = _timed_step(replays, gpu, context) or (None, None)
    host = replays.host_tensors.peak_with(context.host)
    is_host_enough = budget.host_bytes is None or sum(host.values()) <= budget.host_bytes
    estimate = _estimate(
        trace,
        replays.tensor_peaks,
        gpu=_limit_of(gpu),
        reserved_peak_bytes=reserved_peak,
        process_peak_bytes=process,
        paged_peak_bytes=process - reserved_peak - room.outside_bytes,
        process_range=process_range,
        budget=budget,
        fits=fits and is_host_enough,
        fits_at_low_end=is_host_enough and fits_at_low_end,
        host_by_part=host,
        step=step,
        playback=Playback(
            block_bytes=replays.unlimited.block_bytes,
            reserved_bytes=replays.reserved_in_the_long_run,
            step=clock,
        ),
        processes=context.processes and _processes(trace, gpu, context.processes),
        choices=(*trace.choices, *_choices_of_allocator(held)),
        not_modelled=(*_not_modelled(trace, gpu), *context.not_modelled),
        trace_seconds=trace_seconds,
    )
    return with_compiled_code(estimate) if context.is_compiled else estimate


def _limit_of(gpu: Gpu) -> DeviceLimit:
    return DeviceLimit(
        name=gpu.name,
        memory_bytes=gpu.memory_bytes,
        held_by_others_bytes=gpu.held_by_others_bytes or 0,
        context_is_estimate=gpu.context_is_estimate,
    )


def _not_modelled(trace: Trace, gpu: Gpu) -> tuple[str, ...]:
    """Return what an estimate leaves out of a trace on such a GPU."""
    others = () if gpu.held_by_others_bytes is not None else (OTHERS,)
    return (*others, *NOT_MODELLED, *_convolutions_in_words(trace))


def _convolutions_in_words(trace: Trace) -> Iterator[str]:
    """Yield what is left out of a program that convolves: cuDNN picks the kernel by speed, whatever it needs.

    Depthwise convolutions are torch's own kernels. Source: pytorch, aten/src/ATen/native/cudnn/Conv_v8.cpp (try_plans).
    """
    ends = trace.step_ends
    last_step = trace.work[ends[-2] if len(ends) > 1 else 0 : ends[-1] if ends else None]
    number = sum(entry.times for entry in last_step if entry.name == "convolution" and entry.shape[1] > 1)
    if number:
        yield (
            f"cuDNN's workspaces in convolutions ({number:,} in a traced step): it picks the fastest kernel, and where "
            "memory is short torch takes one that needs less"
        )


def _choices_of_allocator(held: Held | None) -> Iterator[str]:
    """Yield what it costs to stay within the limit."""
    if held is not None and held.num_retries:
        yield (
            f"the allocator has to empty its cache {held.num_retries} times to stay within the limit, which costs "
            "time; PYTORCH_ALLOC_CONF=expandable_segments:True needs less"
        )


def estimate_on_cpu(
    trace: Trace, name: str, budget: BudgetVerdict, context: EstimateContext, trace_seconds: float = 0.0
) -> MemoryEstimate:
    """Estimate a traced program on a machine without a GPU: its tensors, exactly, and what the heap keeps in addition.

    Args:
        trace: the trace of a program on a machine without a GPU.
        name: name of the machine's processor.
        budget: the limits.
        context: facts that the trace does not contain.
        trace_seconds: seconds that tracing took, for the record.

    Returns:
        The estimate; what the heap keeps of freed tensors counts as reserved. It has the work of a step, and no
        seconds, which ``foundation/memory/cpu_step_time.py`` adds where a step was timed on the processor.
    """
    allocated = list(trace.timeline.live_bytes())
    sizes = [allocation.size_bytes for allocation in trace.timeline.allocations]
    peak_at = max(range(len(allocated)), key=allocated.__getitem__, default=None)
    tensors = TensorPeaks.of(trace.timeline, allocated, sizes, peak_at)
    peak = tensors.allocated_peak_bytes
    alive = (
        [] if peak_at is None else [trace.timeline.allocations[at] for at in trace.timeline.alive_at(peak_at)]
    )
    arrays = sum(
        one.size_bytes for one in alive if one.place == "host"
    )  # of NumPy's, not of torch's allocator
    base = context.host.process_bytes + arrays
    heap = _kept_by_heap(alive, context)
    process, uncertainty = peak + heap + base, uncertainty_on_cpu()
    margin = uncertainty.bytes_of(heap, base)
    limits = [limit for limit in (budget.device_bytes, budget.host_bytes) if limit is not None]
    process_range = ProcessRange(
        low_bytes=process - margin, high_bytes=process + margin, uncertainty=uncertainty
    )
    estimate = _estimate(
        trace,
        tensors,
        gpu=DeviceLimit(name=name, memory_bytes=budget.device_bytes or 0),
        reserved_peak_bytes=peak + heap,
        process_peak_bytes=process,
        process_range=process_range,
        budget=budget,
        fits=process_range.high_bytes <= min(limits, default=process_range.high_bytes),
        fits_at_low_end=process_range.low_bytes <= min(limits, default=process_range.low_bytes),
        host_by_part={**tensors.by_category_at_peak, "heap": heap, "process": base},
        step=None,
        cpu_work=cpu_work(
            trace, tokens=context.tokens_per_step, micro_batches=context.micro_batches_per_step
        ),
        processes=context.processes,
        choices=trace.choices,
        not_modelled=(NO_SECONDS, _inside_kernels(trace), *context.not_modelled),
        trace_seconds=trace_seconds,
    )
    return with_compiled_code(estimate) if context.is_compiled else estimate


def _kept_by_heap(alive: list[Allocation], context: EstimateContext) -> int:
    """Return the bytes that a process without a GPU holds in gaps between the heap's tensors at their peak."""
    sizes = (tensor.size_bytes for tensor in alive if tensor.place == "device")
    in_heap = sum(size for size in sizes if size < context.largest_in_heap_bytes)
    return round(context.heap_share * in_heap)


def step_time(replays: Replays, gpu: Gpu, context: EstimateContext) -> StepTime | None:
    """Return the time of one optimizer step in the steady state; None if the trace has no step."""
    found = _timed_step(replays, gpu, context)
    return None if found is None else found[0]


def _inside_kernels(trace: Trace) -> str:
    """Return what is left out of kernels: oneDNN alone knows what it keeps of an LSTM's layers."""
    kept = ", and what oneDNN keeps of LSTM layers for backward, which may be most of all"
    return "workspaces inside the CPU's kernels" + kept * any(
        one.name == "mkldnn_rnn_layer" for one in trace.work
    )


def _timed_step(replays: Replays, gpu: Gpu, context: EstimateContext) -> tuple[StepTime, StepClock] | None:
    """Return the time of a step and its clock; None likewise."""
    trace = replays.trace
    step_ends = trace.step_ends
    if not step_ends:
        return None
    processes = context.processes
    times = replays.clock.times_on(gpu, processes and link_between(gpu, processes.num_machines))
    first, last = [0, *step_ends][-2:]
    step = times.between(first, last)
    sent = replays.clock.sent_bytes(first, last)
    stretches = [(1, first, last)]
    traced = [bounds for bounds in trace.micro_batches if first <= bounds[0] < last]
    wanted = context.micro_batches_per_step
    others, each_seconds = 0, 0.0
    spans = [(1, step)]
    if traced and wanted is not None:
        others = wanted - len(traced)
        repeated = traced[0 if context.sends_at_the_end else -1]
        each = times.between(*repeated)
        each_seconds = each.seconds
        spans.append((others, each))
        sent += others * replays.clock.sent_bytes(*repeated)
        stretches.append((others, *repeated))
    clock = step_clock(trace, times, (first, last), untraced=max(0, others), untraced_seconds=each_seconds)
    if context.share_like_last < 1:
        before = [0, *step_ends][-3:-1]
        parts = (context.share_like_last, 1 - context.share_like_last)
        spans = [(parts[0], Span.of_parts(spans)), (parts[1], times.between(*before))]
        stretches = [*((parts[0] * number, *bounds) for number, *bounds in stretches), (parts[1], *before)]
    whole = Span.of_parts(spans)
    by_operator, of_kernels = (
        _sum_of((times_run, seconds(times, *bounds)) for times_run, *bounds in stretches)
        for seconds in (replays.clock.seconds_by_operator, replays.clock.seconds_by_kind)
    )
    by_kind = kinds_of_work(whole, of_kernels)
    found = StepTime(
        seconds=whole.seconds,
        tokens=context.tokens_per_step,
        bound_by=whole.bound_by,
        host_share=whole.shares["kernel launches"],
        host_range=gpu.rates.host_range,
        sent_bytes=sent,
        seconds_share=gpu.rates.share_with(by_kind),
        unlike_measured=gpu.rates.unlike_measured(by_kind),
        by_operator=by_operator,
        by_kind=by_kind,
    )
    return found, clock


def _sum_of(parts: Iterable[tuple[float, Mapping[str, float]]]) -> dict[str, float]:
    """Return the sums of numbers by name, each part as often as it counts."""
    sums: dict[str, float] = {}
    for times, numbers in parts:
        for name, number in numbers.items():
            sums[name] = sums.get(name, 0.0) + times * number
    return sums


def _processes(trace: Trace, gpu: Gpu, processes: Processes) -> Processes:
    """Add the link that ranks exchange data over, and the bytes that they would send at the least."""
    link, ideal, plan = link_between(gpu, processes.num_machines), 0, processes.plan
    if plan.shards_rows:
        timeline = trace.timeline
        alive = (timeline.allocations[index] for index in timeline.alive_at(len(timeline.events) - 1))
        weights = sum(one.size_bytes for one in alive if one.category == "parameter")
        trained = trace.model.trainable_parameters / max(trace.model.parameters, 1)
        ideal = round((len(plan.shard_group) - 1) * weights * (2 + trained))
    return dataclasses.replace(
        processes, link=link.name, link_bytes_per_second=link.bytes_per_second, ideal_sent_bytes=ideal
    )


def _estimate(
    trace: Trace,
    tensors: TensorPeaks,
    *,
    host_by_part: Mapping[str, int],
    choices: tuple[str, ...],
    **fields: Any,
) -> MemoryEstimate:
    """Return an estimate with those of its fields that follow from the trace, and the others as given."""
    if trace.assumed_largest:
        choices = (*choices, f"taken at their largest, as values decide: {', '.join(trace.assumed_largest)}")
    return MemoryEstimate(
        model=trace.model,
        **vars(tensors),
        host_peak_bytes=sum(host_by_part.values()),
        host_by_part_at_peak=host_by_part,
        choices=choices,
        versions=_library_versions(),
        timeline=trace.timeline,
        **fields,
    )


_LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")
"""Libraries, in addition to torch, whose code a trace runs.

PEFT decides the type of adapters, bitsandbytes how 4-bit weights are made. With another version a run can
need 5 to 20% more or less.
"""


def _library_versions() -> dict[str, str]:
    """Return the versions of lowmem_ft, torch, Python and those of :data:`_LIBRARIES` that are installed, by name."""
    versions = {"lowmem_ft": lowmem_ft.__version__, "torch": str(torch.__version__)}
    installed = {library: installed_version(library) for library in _LIBRARIES}
    versions |= {library: version for library, version in installed.items() if version is not None}
    return {**versions, "python": platform.python_version()}
