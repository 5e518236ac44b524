"""Memory and time that a recipe needs, before a GPU is rented: its own step on a virtual GPU, replayed on real ones."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lowmem_ft.foundation.budget import Budget
from lowmem_ft.foundation.catalog.context_overhead import process_overhead_bytes
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate, Processes
from lowmem_ft.foundation.memory.uncertainty import HEAP_SHARE_OF_RUNS
from lowmem_ft.foundation.system.garbage_collector import collector_paused
from lowmem_ft.foundation.system.malloc import LARGEST_IN_HEAP_BYTES
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.hf_config import other_parts_of
from lowmem_ft.planning.estimator.device_target import (
    budget_beyond,
    capped_bytes,
    choose_gpu,
    limits,
    processor_name,
)
from lowmem_ft.planning.estimator.run_host_memory import host_outside
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.estimator.traces.traced_recipe import TracedRecipe
from lowmem_ft.planning.estimator.traces.tracing import is_cut_unevenly, trace_recipe
from lowmem_ft.planning.estimator.worst_batch import DOCUMENTS_PER_PACKED_ROW
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.recipe.named_recipe import RecipeLike, as_budget, as_recipe
from lowmem_ft.recipe.reading.another_model import fitted_in
from lowmem_ft.recipe.reading.keys import key_with, memory_knobs
from lowmem_ft.virtual_gpu.costs.workspaces import cublas_workspace_bytes
from lowmem_ft.virtual_gpu.gpu import VirtualGPU
from lowmem_ft.virtual_gpu.replay.other_workspaces import with_workspaces
from lowmem_ft.virtual_gpu.replay.shared_replays import Replays
from lowmem_ft.virtual_gpu.replay.trace_estimate import (
    EstimateContext,
    allocator_config_of_runs,
    estimate_on_cpu,
    estimate_on_gpu,
)
from lowmem_ft.virtual_gpu.tracing_machine import TracingMachine
from lowmem_ft.virtual_gpu.values.routing import Routing

DIFFERENT_ROUTING = 0.01
"""Share of the process's peak: smaller differences from the peak with balanced routing are not reported."""


def estimate_memory(
    recipe: RecipeLike,
    gpu: str | Gpu | None = None,
    *,
    budget: Budget | str | None = None,
    kept: KeptTraces | None = None,
) -> MemoryEstimate:
    """Estimate what a recipe needs on one device, from its configs alone: no GPU, no weights, no data.

    The training step itself runs on a virtual GPU at the recipe's worst batch: load, two optimizer steps, and an
    evaluation if the recipe has held-out data. Where the rows of a mixture's experts decide sizes, both routings are
    traced (``virtual_gpu/values/routing.py``): the memory is that of the one which needs more, the time that of the
    balanced one. Packed rows of one document each (``data.documents_per_row=1``) take the seconds of one, and the
    memory of one or several, whichever needs more.

    Args:
        recipe: the recipe to train, or its name or path.
        gpu: a GPU or its name in the catalogue (``rtx-4090``), several (``8xrtx-4090``), or ``cpu``; None: this
            machine's GPU, else one of the size of the budget, else this machine's processor.
        budget: the memory that may be used, or the device's part such as ``24GiB``; None: the recipe's own budget.
        kept: traces made before, and where to keep this one, see ``planning/estimator/traces/trace_cache.py``; None:
            trace again.

    Returns:
        The estimate.

    Raises:
        UserError: if the catalogue has no such GPU, or the GPU cannot run the recipe.
        ModelError: if the model cannot be found, or its forward cannot be traced.
    """
    recipe = as_recipe(recipe)
    recipe, gpu = on_gpus(recipe, gpu) if isinstance(gpu, str) else (on_gpus(recipe, None)[0], gpu)
    budget = as_budget(budget) or recipe.budget
    estimate = _estimated(recipe, gpu, budget, kept)
    if (of_several := _with_several_documents(recipe)) is None:
        return estimate
    return _in_seconds_of(estimate, _estimated(of_several, gpu, budget, kept))


def _estimated(
    recipe: Recipe, gpu: Gpu | str | None, budget: Budget, kept: KeptTraces | None
) -> MemoryEstimate:
    spec, reason = choose_gpu(gpu, budget, use_cpu=recipe.training.use_cpu)
    start = time.perf_counter()
    traced = _trace(recipe, spec, kept)
    estimate = estimate_of_trace(recipe, traced, spec, budget, time.perf_counter() - start, reason)
    if traced.trace.does_routing_decide:
        traced = _trace(recipe, spec, kept, routing="balanced")
        balanced = estimate_of_trace(recipe, traced, spec, budget, 0.0, reason)
        estimate = dataclasses.replace(
            _of_most_memory(estimate, balanced), trace_seconds=time.perf_counter() - start
        )
    if estimate.processes is None or not is_cut_unevenly(recipe):
        return estimate
    traced = _trace(recipe, spec, kept, estimate.processes.num_processes - 1)
    last = estimate_of_trace(recipe, traced, spec, budget, 0.0, reason)
    return dataclasses.replace(_with_last_rank(estimate, last), trace_seconds=time.perf_counter() - start)


def estimate_without_timeline(recipe: Recipe, gpu: str | Gpu) -> MemoryEstimate:
    """Call :func:`estimate_memory` and drop the single allocations, a lot of data for another process to hand over."""
    return estimate_memory(recipe, gpu, kept=KeptTraces.of_user()).without_timeline()


def _of_most_memory(uneven: MemoryEstimate, balanced: MemoryEstimate) -> MemoryEstimate:
    """Return the estimate of the routing that needs more memory, with the balanced one's time, and its peak."""
    most = max(uneven, balanced, key=lambda estimate: estimate.process_peak_bytes)
    difference = most.process_peak_bytes - balanced.process_peak_bytes
    is_worth_a_word = difference > DIFFERENT_ROUTING * balanced.process_peak_bytes
    return dataclasses.replace(
        most,
        step=balanced.step,
        cpu_work=balanced.cpu_work,
        balanced_peak_bytes=balanced.process_peak_bytes if is_worth_a_word else None,
    )


def _with_several_documents(recipe: Recipe) -> Recipe | None:
    """Return a recipe whose packed rows hold one document with several in each, as some of its rows may; else None."""
    if recipe.data.documents_per_row != 1:
        return None
    return dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, documents_per_row=None))


def _in_seconds_of(of_one: MemoryEstimate, of_several: MemoryEstimate) -> MemoryEstimate:
    """Combine the time for one-document rows with the larger of the two memory estimates."""
    most = max(of_one, of_several, key=lambda found: (found.process_peak_bytes, found.allocated_peak_bytes))
    if most is of_one:
        return of_one
    return dataclasses.replace(of_several, step=of_one.step, cpu_work=of_one.cpu_work, choices=of_one.choices)


def _with_last_rank(estimate: MemoryEstimate, last: MemoryEstimate) -> MemoryEstimate:
    """Return the estimate of the first rank, with the peak of the last rank, whose rows differ."""
    assert estimate.processes is not None
    processes = dataclasses.replace(estimate.processes, last_peak_bytes=last.process_peak_bytes)
    return dataclasses.replace(estimate, processes=processes)


@dataclass(frozen=True, kw_only=True)
class CannotRun:
    """A GPU that a recipe cannot run on, and why."""

    gpu: Gpu
    problems: tuple[str, ...]


def estimate_on_gpus(
    recipe: Recipe,
    gpus: Sequence[Gpu],
    *,
    budget: Budget | None = None,
    kind: Callable[[Gpu], object] | None = None,
    kept: KeptTraces | None = None,
) -> list[MemoryEstimate | CannotRun]:
    """Estimate what a recipe needs on each of many GPUs; GPUs that run the same kernels share a trace.

    Args:
        recipe: the recipe to train.
        gpus: the GPUs.
        budget: the memory that may be used; None: the recipe's own budget.
        kind: a key function: GPUs with equal keys share a trace, that of the first; None: those that run the same
            kernels.
        kept: as for :func:`estimate_memory`.

    Returns:
        For each GPU, in their order, the estimate or why it cannot run the recipe.

    Raises:
        UserError: if no GPU at all can run it: the problems of the first.
    """
    recipe, _ = on_gpus(recipe, None)
    shared = SharedTraces(recipe, budget=budget, kind=kind, kept=kept)
    results = [shared.estimate(gpu) for gpu in gpus]
    if errors := shared.errors_of_all:
        raise errors[0]
    return results


class SharedTraces:
    """Estimates of one recipe on one GPU after another, which share what they can.

    Args:
        recipe: the recipe to train, with its processes as :func:`on_gpus` fills them in.
        budget: as for :func:`estimate_on_gpus`.
        kind: likewise.
        kept: likewise.
        traced_on: the GPU whose kernels all of them share, so that traces of several recipes share what they can; None:
            the first of each kind.
    """

    def __init__(
        self,
        recipe: Recipe,
        *,
        budget: Budget | None = None,
        kind: Callable[[Gpu], object] | None = None,
        kept: KeptTraces | None = None,
        traced_on: Gpu | None = None,
    ) -> None:
        self._recipe = recipe
        self._budget = budget or recipe.budget
        self._kind = kind or functools.partial(_kind, recipe)
        self._kept = kept
        self._traced_on = traced_on
        self._traces: dict[object, TracedRecipe | UserError] = {}
        self._replays: dict[object, Replays] = {}
        self._first_replays: dict[int, Replays] = {}
        self._is_cut_unevenly = is_cut_unevenly(recipe)
        several = _with_several_documents(recipe)
        self._of_several = several and SharedTraces(several, budget=self._budget, kind=kind, kept=kept)

    def estimate(self, gpu: Gpu) -> MemoryEstimate | CannotRun:
        """Return what the recipe needs on a GPU, or why it cannot run there."""
        estimate = self._of_all_processes(gpu)
        if self._of_several is None or isinstance(estimate, CannotRun):
            return estimate
        of_several = self._of_several.estimate(gpu)
        return of_several if isinstance(of_several, CannotRun) else _in_seconds_of(estimate, of_several)

    def _of_all_processes(self, gpu: Gpu) -> MemoryEstimate | CannotRun:
        estimate = self._of_process(gpu, 0)
        if isinstance(estimate, CannotRun) or estimate.processes is None or not self._is_cut_unevenly:
            return estimate
        last = self._of_process(gpu, estimate.processes.num_processes - 1)
        if isinstance(last, CannotRun):
            return last
        return _with_last_rank(estimate, last)

    def _of_process(self, gpu: Gpu, process_index: int) -> MemoryEstimate | CannotRun:
        start = time.perf_counter()
        traced = self._trace(gpu, process_index)
        if isinstance(traced, UserError):
            return CannotRun(gpu=gpu, problems=traced.problems)
        workspace = cublas_workspace_bytes(gpu.compute_capability)
        alike = (id(traced), workspace, gpu.segments_grow)
        if alike not in self._replays:
            trace = with_workspaces(traced.trace, workspace)
            first = self._first_replays.get(id(traced))
            self._replays[alike] = Replays(trace, allocator_config_of_runs(gpu), first)
            self._first_replays.setdefault(id(traced), self._replays[alike])
        on_gpu = dataclasses.replace(traced, trace=self._replays[alike].trace)
        seconds = time.perf_counter() - start
        return estimate_of_trace(self._recipe, on_gpu, gpu, self._budget, seconds, "", self._replays[alike])

    @property
    def errors_of_all(self) -> list[UserError]:
        """The errors of all traces; empty if one succeeded, or no trace was made."""
        errors = [trace for trace in self._traces.values() if isinstance(trace, UserError)]
        return errors if len(errors) == len(self._traces) else []

    def _trace(self, gpu: Gpu, process_index: int = 0) -> TracedRecipe | UserError:
        kind = self._kind(gpu), process_index
        if kind not in self._traces:
            try:
                traced = _trace(self._recipe, self._traced_on or gpu, self._kept, process_index)
            except UserError as error:
                traced = error
            # Kernels that the GPUs could have chosen otherwise may be the same after all, and so are their replays.
            alike = (other for other in self._traces.values() if other == traced)
            self._traces[kind] = next(alike, traced)
        return self._traces[kind]


def _kind(recipe: Recipe, gpu: Gpu) -> tuple[object, ...]:
    """Return what decides which kernels run and what they allocate; deterministic ones split by multiprocessors.

    Triton updates the weights where it is installed, and packages have kernels for layers with a recurrent state.
    """
    is_deterministic = recipe.training.full_determinism or torch.are_deterministic_algorithms_enabled()
    num_splits = gpu.num_multiprocessors if is_deterministic else None
    return gpu.compute_capability, num_splits, gpu.has_triton, gpu.kernel_packages


def _trace(
    recipe: Recipe,
    gpu: Gpu | None,
    kept: KeptTraces | None,
    process_index: int = 0,
    routing: Routing = "uneven",
) -> TracedRecipe:
    machine = TracingMachine if gpu is None else functools.partial(VirtualGPU, gpu)
    new_machine = functools.partial(machine, routing=routing)
    kind = (None if gpu is None else _kind(recipe, gpu)), routing
    return trace_recipe(recipe, new_machine, kept=kept, machine=kind, process_index=process_index)


@collector_paused()
def estimate_of_trace(
    recipe: Recipe,
    traced: TracedRecipe,
    gpu: Gpu | None,
    budget: Budget,
    trace_seconds: float,
    reason: str,
    replays: Replays | None = None,
) -> MemoryEstimate:
    """Estimate what a recipe needs on one device, from its trace.

    Args:
        recipe: the recipe that was traced.
        traced: its trace on a machine of the same kind.
        gpu: the GPU; None: this machine's processor.
        budget: the memory that may be used.
        trace_seconds: seconds that tracing took, for the record.
        reason: why this device, for people; empty if the caller named it.
        replays: replays of the trace, to share them; None: fresh ones.

    Returns:
        The estimate.
    """
    context = estimate_context_of(recipe, traced, gpu, budget)
    allowed = limits(gpu, budget, recipe.distributed.per_machine)
    if gpu is None:
        estimate = estimate_on_cpu(traced.trace, processor_name(), allowed, context, trace_seconds)
    else:
        estimate = estimate_on_gpu(traced.trace, gpu, allowed, context, trace_seconds, replays)
    choices = [
        reason,
        budget_beyond(gpu, budget),
        f"batch: {traced.batch}, {_window(recipe)}",
        _documents(recipe, traced),
        f"recipe: {_settings(recipe)}",
        *fitted_in(recipe),
        *estimate.choices,
    ]
    model = dataclasses.replace(estimate.model, other_parameters=_other_parameters(recipe.model))
    return dataclasses.replace(estimate, model=model, choices=tuple(choice for choice in choices if choice))


@functools.lru_cache(maxsize=16)
def _other_parameters(config: ModelConfig) -> int:
    """Return the parameters of a model that are not its language model's."""
    parts = other_parts_of(config)
    return 0 if parts is None else parts.num_parameters


def estimate_context_of(
    recipe: Recipe, traced: TracedRecipe, gpu: Gpu | None, budget: Budget
) -> EstimateContext:
    """Return what an estimate needs to know beyond the trace; arguments as for :func:`estimate_of_trace`."""
    outside = process_overhead_bytes(
        gpu,
        uses_bitsandbytes=recipe.uses_bitsandbytes,
        num_processes=recipe.distributed.num_processes or 1,
    )
    return EstimateContext(
        outside_bytes=outside,
        host=host_outside(traced, recipe, on_gpu=gpu is not None),
        tokens_per_step=traced.tokens_per_micro_batch * recipe.training.gradient_accumulation_steps,
        micro_batches_per_step=_untraced_micro_batches(recipe),
        processes=_processes(recipe),
        allocator=allocator_config_of_runs(gpu),
        allowed_bytes=capped_bytes(budget, outside),
        largest_in_heap_bytes=LARGEST_IN_HEAP_BYTES,
        heap_share=HEAP_SHARE_OF_RUNS,
        sends_at_the_end=recipe.distributed.plan().copies_weights or not recipe.distributed.sync_each_batch,
        not_modelled=() if recipe.offload.folder is None else ("time of reading and writing offload.folder",),
    )


def _processes(recipe: Recipe) -> Processes | None:
    plan = recipe.distributed.plan()
    if not plan.several:
        return None
    return Processes(strategy=plan.strategy, num_processes=plan.num_processes, num_machines=plan.num_machines)


def _untraced_micro_batches(recipe: Recipe) -> int | None:
    """Return the micro-batches of a step if only the first are traced; None if they come together: all are traced."""
    if key_with(recipe, "whole window at once"):
        return None
    return recipe.training.gradient_accumulation_steps


def _window(recipe: Recipe) -> str:
    num_micro_batches = recipe.training.gradient_accumulation_steps
    return "one a step" if num_micro_batches == 1 else f"{num_micro_batches} a step"


def _documents(recipe: Recipe, traced: TracedRecipe) -> str:
    """Say how many documents packed rows are timed with: attention costs by their lengths."""
    if not recipe.data.packing:
        return ""
    row_tokens = traced.tokens_per_micro_batch // recipe.training.per_device_train_batch_size
    number = recipe.data.documents_per_row or DOCUMENTS_PER_PACKED_ROW
    each = "one document" if number == 1 else f"{number} documents of {row_tokens // number:,} tokens"
    source = "" if recipe.data.documents_per_row else ", which data.documents_per_row=N changes"
    return f"packed rows: timed as {each}{source}"


def _adapter(recipe: Recipe) -> list[str]:
    if recipe.adapter.name == "none":
        return []
    quantized = (
        [] if recipe.model.quantization == "none" else [f"linear layers in {recipe.model.quantization}"]
    )
    whole = [f"{name} trained whole" for name in recipe.adapter.modules_to_save]
    if recipe.adapter.train_new_tokens:
        whole.append("rows of new tokens")
    return [*quantized, f"adapters of rank {recipe.adapter.r}", *whole]


_IN_WORDS = {
    "model.dtype",
    "model.quantization",
    "adapter.name",
    "training.mixed_precision",
    "optimizer.name",
    "checkpointing.mode",
    "loss.chunk_tokens",
    "training.per_device_train_batch_size",
    "training.gradient_accumulation_steps",
    "data.max_length",
}
"""Knobs that the lines about batch and recipe describe in words."""


def _settings(recipe: Recipe) -> str:
    """Describe what decides most of the memory: if a user names only a model, no file of theirs has the defaults.

    Further knobs, which have no words of their own, appear as a user types them, if they are not at their default.
    """
    training, chunk_tokens = recipe.training, recipe.loss.chunk_tokens
    further = [
        key.setting(value)
        for key, value, _ in memory_knobs(recipe)
        if key.path not in _IN_WORDS and value != key.default
    ]
    return ", ".join(
        (
            f"{recipe.model.dtype} weights",
            *_adapter(recipe),
            f"mixed precision {training.mixed_precision}",
            f"optimizer {recipe.optimizer.name}",
            f"checkpointing {recipe.checkpointing.mode}",
            "whole logits" if chunk_tokens is None else f"loss in chunks of {chunk_tokens} tokens",
            *further,
        )
    )
