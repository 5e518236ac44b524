"""The memory and time that a user's unchanged training script needs, from a few steps on a virtual GPU."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.budget import Budget
from lowmem_ft.catalog.gpu_spec import Gpu
from lowmem_ft.estimator.device_target import choose_gpu, limits, processor_name
from lowmem_ft.estimator.estimate import CannotRun
from lowmem_ft.estimator.run_host_memory import TENSORS_IN_FLIGHT, process_bytes_on_cpu
from lowmem_ft.estimator.script.running import OF_ONE_PROCESS, ScriptError, ScriptRun
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.script_file import check_script
from lowmem_ft.memory.memory_estimate import MemoryEstimate
from lowmem_ft.system.garbage_collector import collector_paused
from lowmem_ft.system.process_size import HOST_BYTES_WITH_CUDA
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.kernels.workspaces import cublas_workspace_bytes
from lowmem_ft.virtual_gpu.recording.code_places import Running
from lowmem_ft.virtual_gpu.recording.trace import Trace
from lowmem_ft.virtual_gpu.replay.context_overhead import process_overhead_bytes
from lowmem_ft.virtual_gpu.replay.host_peak import HostOutside
from lowmem_ft.virtual_gpu.replay.other_workspaces import with_workspaces
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.replay.trace_estimate import (
    Surroundings,
    allocator_config_of_environment,
    estimate_on_cpu,
    estimate_on_gpu,
)
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine

NUM_STEPS = 3
"""The first step creates the optimizer state, so the second is the first to hold all of it; by the third the caching
allocator has settled."""

NOT_MODELLED = (
    "host memory of the script other than its tensors, and of files being written",
    "rows of the data that are longer than those in these steps",
)

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
    """

    estimate: MemoryEstimate
    script: str
    arguments: tuple[str, ...]
    steps: int
    tokens_per_step: int
    kept_bytes: int
    peak: Running
    host_waits_per_step: int | None

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
                "tokens_per_step": self.tokens_per_step,
                "kept_bytes": self.kept_bytes,
                "peak_in_code": dataclasses.asdict(self.peak),
                "host_waits_per_step": self.host_waits_per_step,
            },
        }


def estimate_script(
    script: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    gpu: str | Gpu | None = None,
    steps: int = NUM_STEPS,
    on_step: Callable[[int], None] = lambda step: None,
    on_trainer: Callable[[Any], None] = lambda trainer: None,
    on_reading: Callable[[], None] = lambda: None,
) -> ScriptEstimate:
    """Estimate what a training script needs on one device, without a GPU and without weights.

    The script runs unchanged, in this process, for a few optimizer steps: its models are built from their configs, its
    data is shortened, and the files that it writes go to a temporary folder that is deleted.

    Args:
        script: a Python file that trains with torch in one process.
        arguments: what it finds in ``sys.argv`` after its own name.
        gpu: a GPU or its name in the catalogue (``rtx-4090``), or ``cpu``; None: this machine's GPU, else its
            processor.
        steps: optimizer steps to see.
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
    spec, reason = choose_gpu(gpu, Budget(), use_cpu=False)
    seen = _run(path, arguments, spec, steps, on_step, on_trainer, on_reading)
    return seen.on(spec, reason)


def estimate_script_on_gpus(
    script: str | os.PathLike[str],
    arguments: Sequence[str],
    gpus: Sequence[Gpu],
    *,
    steps: int = NUM_STEPS,
    on_step: Callable[[int], None] = lambda step: None,
    on_reading: Callable[[], None] = lambda: None,
) -> list[ScriptEstimate | CannotRun]:
    """Estimate it for many GPUs: the script runs once for all that compute with bfloat16, and once for the others.

    Args:
        script: as for :func:`estimate_script`.
        arguments: likewise.
        gpus: the GPUs.
        steps: likewise.
        on_step: likewise.
        on_reading: likewise.

    Returns:
        For each GPU, in their order, the estimate or why it cannot run the script.

    Raises:
        UserError: if no GPU at all can run it: the problems of the first.
    """
    path = check_script(script)
    runs: dict[bool, _Seen | UserError] = {}
    results: list[ScriptEstimate | CannotRun] = []
    for gpu in gpus:
        if gpu.has_bfloat16 not in runs:
            try:
                runs[gpu.has_bfloat16] = _run(path, arguments, gpu, steps, on_step, on_reading=on_reading)
            except UserError as error:
                runs[gpu.has_bfloat16] = error
        seen = runs[gpu.has_bfloat16]
        if isinstance(seen, UserError):
            results.append(CannotRun(gpu=gpu, problems=seen.problems))
        else:
            results.append(seen.on(gpu, ""))
    errors = [run for run in runs.values() if isinstance(run, UserError)]
    if errors and len(errors) == len(runs):
        raise errors[0]
    return results


@collector_paused()
def _run(
    path: Path,
    arguments: Sequence[str],
    gpu: Gpu | None,
    steps: int,
    on_step: Callable[[int], None],
    on_trainer: Callable[[Any], None] = lambda trainer: None,
    on_reading: Callable[[], None] = lambda: None,
) -> _Seen:
    def run(**more: Any) -> ScriptRun:
        machine = TracingMachine() if gpu is None else VirtualGPU(gpu)
        one = ScriptRun(path, arguments, machine, steps, on_step, on_trainer, on_reading, **more)
        one.run()
        return one

    try:
        return _Seen(run())
    except ScriptError as error:
        if not error.needs_launcher:
            raise
    return _Seen(run(environment=OF_ONE_PROCESS))


class _Seen:
    """A finished run, to be replayed on the GPUs of its kind."""

    def __init__(self, run: ScriptRun) -> None:
        self._run = run
        self._trace = run.machine.trace()
        self._replays: dict[int, Replays] = {}

    @collector_paused()
    def on(self, gpu: Gpu | None, reason: str) -> ScriptEstimate:
        """Return the estimate for one device."""
        steps, trace, seconds = self._run.watch.steps, self._trace, self._run.machine.trace_seconds
        tokens = self._run.training.tokens_of_step(steps[-1].tokens)
        surroundings = Surroundings(
            outside_bytes=process_overhead_bytes(
                gpu, uses_bitsandbytes=_uses_bitsandbytes(trace), num_processes=1
            ),
            allowed_bytes=getattr(self._run.machine, "cap_bytes", None),
            host=_host_outside(trace, on_gpu=gpu is not None),
            tokens_per_step=tokens,
            micro_batches_per_step=self._run.training.micro_batches,
            not_modelled=NOT_MODELLED,
        )
        allowed = limits(gpu, Budget())
        if gpu is None:
            estimate = estimate_on_cpu(trace, processor_name(), allowed, surroundings, seconds)
        else:
            replays = self._replays_for(gpu)
            estimate = estimate_on_gpu(replays.trace, gpu, allowed, surroundings, seconds, replays)
        choices = (
            reason,
            *estimate.choices,
            self._steps_in_words(),
            self._data_in_words(),
            self._loop_in_words(),
        )
        return ScriptEstimate(
            estimate=dataclasses.replace(estimate, choices=tuple(filter(None, choices))),
            script=str(self._run.path),
            arguments=tuple(self._run.arguments),
            steps=len(steps) if self._run.watch.num_backwards is None else 0,
            tokens_per_step=tokens,
            kept_bytes=steps[-1].kept_bytes,
            peak=self._run.peak.running,
            host_waits_per_step=None if gpu is None else self._run.watch.host_waits(),
        )

    def _replays_for(self, gpu: Gpu) -> Replays:
        workspace = cublas_workspace_bytes(gpu.compute_capability)
        if workspace not in self._replays:
            trace = with_workspaces(self._trace, workspace)
            self._replays[workspace] = Replays(trace, allocator_config_of_environment())
        return self._replays[workspace]

    def _steps_in_words(self) -> str:
        if (passes := self._run.watch.num_backwards) is not None:
            return (
                f"steps: no optimizer step was seen. The estimate covers the script up to backward pass {passes}, "
                "with what it does with the gradients itself, but not the time of a step"
            )
        seen, wanted = len(self._run.watch.steps), self._run.watch.num_steps
        if seen >= wanted:
            return ""
        first = "; with one, the optimizer's state was just being made" if seen == 1 else ""
        return f"steps: the script ended after {seen} of {wanted} requested{first}"

    def _data_in_words(self) -> str:
        left_out = self._run.cut.rows_left_out
        return (
            f"data: {left_out:,} rows were left out because these steps do not reach them" if left_out else ""
        )

    def _loop_in_words(self) -> str:
        if self._run.training.has_trainer:
            return ""
        return "evaluation: the script's own loop is seen up to the last of these steps; later evaluations are not"


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
