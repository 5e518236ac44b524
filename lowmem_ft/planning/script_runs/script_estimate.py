"""The memory and time that a user's unchanged training script needs, from a few steps on a virtual GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.context_overhead import process_overhead_bytes
from lowmem_ft.foundation.catalog.gpu_catalog import split_count
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate, Processes
from lowmem_ft.foundation.script_file import check_script
from lowmem_ft.foundation.system.garbage_collector import collector_paused
from lowmem_ft.foundation.system.process_size import HOST_BYTES_WITH_CUDA
from lowmem_ft.planning.estimator.device_target import choose_gpu, limits, processor_name
from lowmem_ft.planning.estimator.estimate import CannotRun
from lowmem_ft.planning.estimator.run_host_memory import TENSORS_IN_FLIGHT, process_bytes_on_cpu
from lowmem_ft.planning.script_runs.accelerate_launch import by_accelerate
from lowmem_ft.planning.script_runs.batch_search import BatchSearch
from lowmem_ft.planning.script_runs.launch import ALONE, Launch, by_torchrun
from lowmem_ft.planning.script_runs.running import ScriptError, ScriptRun
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.costs.workspaces import cublas_workspace_bytes
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.recording.code_places import Running
from lowmem_ft.virtual_gpu.replay.failed_attempts import without_failed_attempts
from lowmem_ft.virtual_gpu.replay.host_peak import HostOutside
from lowmem_ft.virtual_gpu.replay.other_workspaces import with_workspaces
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.replay.trace_estimate import (
    OTHERS,
    EstimateContext,
    allocator_config_of_environment,
    estimate_on_cpu,
    estimate_on_gpu,
)
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

NUM_STEPS = 3
"""The first step creates the optimizer state, so the second is the first to hold all of it; by the third the caching
allocator has settled."""

NOT_MODELLED = ("host memory of the script other than its tensors, and of files being written",)
LONGER_ROWS = "rows of the data that are longer than those in these steps"

_OF_BITSANDBYTES = ("4bit", "8bit", "bitsandbytes")


@dataclass(frozen=True, kw_only=True)
class ScriptEstimate:
    """The memory and time that a script needs on one device.

    Args:
        estimate: memory and time, as for a recipe.
        script: its path.
        arguments: its arguments.
        steps: optimizer steps seen; 0: the script has no optimizer, and only its backward passes were seen.
        tokens_per_step: tokens that the model learned from in the last step, padding included; 0: it has no embedding.
        kept_bytes: bytes on the device as the last step ended: weights, gradients, optimizer state and everything else.
        peak: what ran when the most device memory was in use.
        host_waits_per_step: how often the host waited for the device in the last step; None: only one was seen, or
            there is no device.
        batches: the batches at which memory ran out, where the script handled that, and the one estimated.
    """

    estimate: MemoryEstimate
    script: str
    arguments: tuple[str, ...]
    steps: int
    tokens_per_step: int
    kept_bytes: int
    peak: Running
    host_waits_per_step: int | None
    batches: BatchSearch

    def __str__(self) -> str:
        own = "outside the script" if self.peak.own is None else f"at {self.peak.own}"
        return f"{self.estimate}\nPeak {own}; {self.steps} steps seen, {self.tokens_per_step:,} tokens each."

    def to_json(self) -> dict[str, Any]:
        """Return the JSON types of a recipe's estimate, with ``script`` added."""
        return {
            **self.estimate.to_json(),
            "script": {
                "path": self.script,
                "arguments": list(self.arguments),
                "steps": self.steps,
                "num_processes": 1
                if self.estimate.processes is None
                else self.estimate.processes.num_processes,
                "tokens_per_step": self.tokens_per_step,
                "kept_bytes": self.kept_bytes,
                "peak_in_code": dataclasses.asdict(self.peak),
                "host_waits_per_step": self.host_waits_per_step,
                "out_of_memory": self.batches.to_json(),
            },
        }


def estimate_script(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    gpu: str | Gpu | None = None,
    steps: int = NUM_STEPS,
    accelerate_config: str | os.PathLike[str] | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    on_trainer: Callable[[Any], None] = lambda trainer: None,
    on_reading: Callable[[], None] = lambda: None,
) -> ScriptEstimate:
    """Estimate what a training script needs on one device, without a GPU and without weights.

    The script runs unchanged, in this process, for a few optimizer steps: its models are built from their configs, its
    data is shortened, and the files that it writes go to a temporary folder that is deleted.

    Args:
        script: a Python file that trains with torch, or a Jupyter notebook, whose code cells are run in order.
        arguments: what it finds in ``sys.argv`` after its own name.
        gpu: a GPU or its name in the catalogue (``rtx-4090``), several of them (``4xrtx-4090``), where the script is
            one of as many processes, or ``cpu``; None: this machine's GPU, else its processor.
        steps: optimizer steps to see.
        accelerate_config: a file of ``accelerate config``, to start it as ``accelerate launch`` would; None: as
            torchrun would where there are several processes, else as Python does.
        on_step: called with the number of each step as it ends.
        on_trainer: called with each trainer of transformers or TRL that is about to train, on the tracing machine.
        on_reading: called as ``load_dataset`` begins to read data, all of it.

    Returns:
        The estimate.

    Raises:
        UserError: if the script cannot be run, never steps, or does what a virtual GPU cannot follow.
        ScriptError: if it ends in an error of its own.
    """
    path = check_script(script)
    count, name = split_count(gpu) if isinstance(gpu, str) else (None, gpu)
    spec, reason = choose_gpu(name, Budget(), use_cpu=False)
    launch = _launch(count, accelerate_config)
    if spec is None and accelerate_config is not None:
        raise UserError(
            f"{os.fspath(accelerate_config)} is about GPUs, got none. Name the type: --gpu rtx-4090, or gpu=... in "
            "Python."
        )
    runs = _Runs(path, arguments, steps, on_step, on_trainer, on_reading, launch)
    return runs.answer(runs.unlimited(spec), spec, reason)


def estimate_script_on_gpus(
    script: str | os.PathLike[str],
    arguments: Sequence[str],
    gpus: Sequence[Gpu],
    *,
    steps: int = NUM_STEPS,
    accelerate_config: str | os.PathLike[str] | None = None,
    on_step: Callable[[int], None] = lambda step: None,
    on_reading: Callable[[], None] = lambda: None,
) -> list[ScriptEstimate | CannotRun]:
    """Estimate it for many GPUs: the script runs once for all that compute with bfloat16, and once for the others.

    Args:
        script: as for :func:`estimate_script`.
        arguments: likewise.
        gpus: the GPUs.
        steps: likewise.
        accelerate_config: likewise.
        on_step: likewise.
        on_reading: likewise.

    Returns:
        For each GPU, in their order, the estimate or why it cannot run the script.

    Raises:
        UserError: if no GPU at all can run it: the problems of the first.
    """
    path, launch = check_script(script), _launch(None, accelerate_config)
    runs = _Runs(path, arguments, steps, on_step, lambda trainer: None, on_reading, launch)
    unlimited: dict[bool, _Seen | UserError] = {}
    results: list[ScriptEstimate | CannotRun] = []
    for gpu in gpus:
        if gpu.has_bfloat16 not in unlimited:
            try:
                unlimited[gpu.has_bfloat16] = runs.unlimited(gpu)
            except UserError as error:
                unlimited[gpu.has_bfloat16] = error
        seen = unlimited[gpu.has_bfloat16]
        if isinstance(seen, UserError):
            results.append(CannotRun(gpu=gpu, problems=seen.problems))
        else:
            results.append(runs.answer(seen, gpu, ""))
    errors = [run for run in unlimited.values() if isinstance(run, UserError)]
    if errors and len(errors) == len(unlimited):
        raise errors[0]
    return results


def _launch(num_gpus: int | None, accelerate_config: str | os.PathLike[str] | None) -> Launch:
    if accelerate_config is not None:
        return by_accelerate(accelerate_config, num_gpus)
    return ALONE if num_gpus in (None, 1) else by_torchrun(num_gpus)


@dataclass(frozen=True)
class _Runs:
    """The runs of one script: with all the memory that it requests; and, if it handles running out, with a limit.

    Args:
        path: as for :class:`ScriptRun`, like all the others.
    """

    path: Path
    arguments: Sequence[str]
    steps: int
    on_step: Callable[[int], None]
    on_trainer: Callable[[Any], None]
    on_reading: Callable[[], None]
    launch: Launch = ALONE

    @collector_paused()
    def unlimited(self, gpu: Gpu | None) -> _Seen:
        """Run it with all the memory that it requests."""
        try:
            first = self._run(gpu, self.launch)
        except ScriptError as error:
            if not error.needs_launcher:
                raise
            first = self._run(gpu, by_torchrun())
        if not first.ranks.is_uneven:
            return _Seen(first)
        return _Seen(first, _Seen(self._run(gpu, self.launch.last(), sent=first.machine.peers.sent)))

    def answer(self, seen: _Seen, gpu: Gpu | None, reason: str) -> ScriptEstimate:
        """Return the estimate for one device; if a script handles out-of-memory errors, for its last attempt.

        It is run with a limit if it needs more than there is. The limit is the one at which the upper end of the
        estimate's range still fits; where another batch's own replay finds less room, it is lowered once.

        Args:
            seen: a run without a limit on a GPU of this kind.
            gpu: the device.
            reason: why it was chosen.
        """
        answer = seen.on(gpu, reason)
        if gpu is None or answer.estimate.fits or not seen.run.handles_running_out:
            return answer
        room = _Room.of(answer.estimate, seen.cap_bytes)
        for _ in range(2):
            limited = self._limited(gpu, room, seen.run)
            if limited is None:
                return answer
            answer = limited.on(gpu, reason)
            if answer.estimate.fits:
                break
            room = room.less(answer.estimate)
        return answer

    @collector_paused()
    def _limited(self, gpu: Gpu, room: _Room, unlimited: ScriptRun) -> _Seen | None:
        """Run it with a limit; None if it ends of that, or sees fewer steps, or never notices."""
        allocator = CachingAllocator(
            allocator_config_of_environment(),
            capacity_bytes=room.capacity_bytes,
            allowed_bytes=room.allowed_bytes,
        )
        # The run without a limit has already reported errors that are not about memory: here they only end the script.
        with contextlib.suppress(UserError):
            run = self._run(gpu, unlimited.launch, allocator=allocator)
            if run.batches.failed and len(run.watch.steps) >= len(unlimited.watch.steps):
                return _Seen(run)
        return None

    def _run(self, gpu: Gpu | None, launch: Launch, *, sent: Sequence[Any] = (), **more: Any) -> ScriptRun:
        machine = TracingMachine() if gpu is None else VirtualGPU(gpu)
        machine.peers = launch.peers(sent)
        run = ScriptRun(
            self.path,
            self.arguments,
            machine,
            self.steps,
            self.on_step,
            self.on_trainer,
            self.on_reading,
            launch,
            **more,
        )
        run.run()
        return run


@dataclass(frozen=True, kw_only=True)
class _Room:
    """The bytes that the caching allocator may hold: with fewer than these, the upper end of the range fits.

    Args:
        capacity_bytes: bytes that the driver can give it.
        allowed_bytes: the most that it lets itself hold; None: all of them.
    """

    capacity_bytes: int
    allowed_bytes: int | None

    @classmethod
    def of(cls, estimate: MemoryEstimate, cap_bytes: int | None) -> _Room:
        assert estimate.process_range is not None
        assert estimate.budget.device_bytes is not None
        uncertainty = estimate.process_range.uncertainty
        outside = estimate.process_peak_bytes - estimate.paged_peak_bytes - estimate.reserved_peak_bytes
        left = estimate.budget.device_bytes - outside - uncertainty.bytes_of(0, outside)
        factor = 1 + uncertainty.reserved_share
        return cls(
            capacity_bytes=max(0, int(left / factor)),
            allowed_bytes=None if cap_bytes is None else int(cap_bytes / factor),
        )

    def less(self, estimate: MemoryEstimate) -> _Room:
        """Return it without the bytes that an estimate is over."""
        over = estimate.process_high_bytes - (estimate.budget.device_bytes or 0)
        allowed = self.allowed_bytes
        return _Room(
            capacity_bytes=max(0, self.capacity_bytes - over),
            allowed_bytes=None if allowed is None else max(0, allowed - over),
        )


class _Seen:
    """A finished run, to be replayed on the GPUs of its kind.

    Args:
        run: the run, of the first rank if there are several.
        last: that of the last rank, where it needs less than the first; None: all ranks are alike.
    """

    def __init__(self, run: ScriptRun, last: _Seen | None = None) -> None:
        self.run = run
        self._last = last
        self.cap_bytes: int | None = getattr(run.machine, "cap_bytes", None)
        self._trace = run.machine.trace()
        if run.memory is not None:
            self._trace = without_failed_attempts(self._trace, run.memory.failures)
        self._replays: dict[int, Replays] = {}

    @collector_paused()
    def on(self, gpu: Gpu | None, reason: str) -> ScriptEstimate:
        """Return the estimate for one device."""
        steps, trace, seconds = self.run.watch.steps, self._trace, self.run.machine.trace_seconds
        launch = self.run.launch
        replays = None if gpu is None else self._replays_for(gpu)
        left = gpu if gpu is None or replays is None else self.run.vllm.left_on(gpu, replays)
        others = (OTHERS,) if left is not gpu and gpu is not None and gpu.held_by_others_bytes is None else ()
        tokens = self.run.training.tokens_of_step(steps[-1].tokens)
        context = EstimateContext(
            outside_bytes=process_overhead_bytes(
                gpu, uses_bitsandbytes=_uses_bitsandbytes(trace), num_processes=launch.num_processes
            ),
            share_like_last=self.run.training.share_generating,
            fragments_bytes=self.run.generation.most_grown_bytes,
            allowed_bytes=self.cap_bytes,
            host=_host_outside(trace, on_gpu=gpu is not None),
            tokens_per_step=tokens,
            micro_batches_per_step=self.run.training.micro_batches,
            processes=self._processes(),
            sends_at_the_end=launch.num_processes > 1,
            not_modelled=(*others, *NOT_MODELLED, *(() if self._has_seen_all() else (LONGER_ROWS,))),
        )
        allowed = limits(left, Budget(), launch.num_processes)
        if left is None or replays is None:
            estimate = estimate_on_cpu(trace, processor_name(), allowed, context, seconds)
        else:
            estimate = estimate_on_gpu(replays.trace, left, allowed, context, seconds, replays)
        choices = (
            reason,
            self.run.passed_over(),
            *estimate.choices,
            self._steps_in_words(),
            self._data_in_words(),
            str(self.run.training.longest.found or ""),
            self._loop_in_words(),
            self.run.vllm.in_words(gpu),
            self.run.after.in_words(),
            str(self.run.batches),
        )
        estimate = dataclasses.replace(estimate, choices=tuple(filter(None, choices)))
        return ScriptEstimate(
            estimate=estimate
            if self._last is None
            else _with_last_rank(estimate, self._last.on(gpu, reason)),
            script=str(self.run.path),
            arguments=tuple(self.run.arguments),
            steps=len(steps) if self.run.watch.num_backwards is None else 0,
            tokens_per_step=tokens,
            kept_bytes=steps[-1].kept_bytes,
            peak=self.run.peak.running,
            host_waits_per_step=None if gpu is None else self.run.watch.host_waits(),
            batches=self.run.batches,
        )

    def _processes(self) -> Processes | None:
        if self.run.launch.num_processes == 1:
            return None
        return Processes(strategy=self.run.ranks.strategy, num_processes=self.run.launch.num_processes)

    def _replays_for(self, gpu: Gpu) -> Replays:
        workspace = cublas_workspace_bytes(gpu.compute_capability)
        if workspace not in self._replays:
            trace = with_workspaces(self._trace, workspace)
            self._replays[workspace] = Replays(trace, allocator_config_of_environment())
        return self._replays[workspace]

    def _steps_in_words(self) -> str:
        if (passes := self.run.watch.num_backwards) is not None:
            return (
                f"steps: no optimizer step was seen. The estimate covers the script up to backward pass {passes}, "
                "with what it does with the gradients itself, but not the time of a step"
            )
        seen, wanted = len(self.run.watch.steps), self.run.watch.num_steps
        if seen >= wanted:
            return ""
        first = "; with one, the optimizer's state was just being made" if seen == 1 else ""
        return f"steps: the script ended after {seen} of {wanted} requested{first}"

    def _has_seen_all(self) -> bool:
        """Return whether the longest batch of all the data is in these steps."""
        return self.run.training.longest.is_in_steps and not self.run.cut.rows_left_out

    def _data_in_words(self) -> str:
        left_out = self.run.cut.rows_left_out
        if not left_out:
            return ""
        not_looked_at = (
            ", and are not looked at for the longest batch" if self.run.training.longest.found else ""
        )
        return f"data: {left_out:,} rows were left out because these steps do not reach them{not_looked_at}"

    def _loop_in_words(self) -> str:
        if self.run.training.has_trainer:
            return ""
        return "evaluation: the script's own loop is seen up to the last of these steps; later evaluations are not"


def _with_last_rank(first: MemoryEstimate, last: ScriptEstimate) -> MemoryEstimate:
    assert first.processes is not None
    processes = dataclasses.replace(
        first.processes,
        last_peak_bytes=last.estimate.process_peak_bytes,
        last_host_bytes=last.estimate.host_peak_bytes,
    )
    return dataclasses.replace(first, processes=processes)


def _host_outside(trace: Trace, *, on_gpu: bool) -> HostOutside:
    if not on_gpu:
        return HostOutside(process_bytes=process_bytes_on_cpu())
    weights = (item.size_bytes for item in trace.timeline.allocations if item.category == "parameter")
    return HostOutside(
        process_bytes=HOST_BYTES_WITH_CUDA, loading_bytes=TENSORS_IN_FLIGHT * max(weights, default=0)
    )


def _uses_bitsandbytes(trace: Trace) -> bool:
    return trace.is_quantized or any(
        _is_of_bitsandbytes(name) for name in {entry.name for entry in trace.work}
    )


@functools.cache
def _is_of_bitsandbytes(name: str) -> bool:
    return any(part in name for part in _OF_BITSANDBYTES)
