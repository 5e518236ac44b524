"""Budgets that no run can keep, or no machine has: checks before torch is imported, which takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import psutil

from lowmem_ft.foundation.budget import Budget, is_of_size
from lowmem_ft.foundation.catalog.gpu_catalog import find_gpu, load_gpus
from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import DoesNotFitError, UserError, raise_problems
from lowmem_ft.foundation.system.process_size import (
    HOST_BYTES_WITH_CUDA,
    LEAST_PROCESS_BYTES,
    LIBRARIES_BYTES,
)
from lowmem_ft.foundation.units import format_bytes, parse_bytes
from lowmem_ft.models.files.model_files import least_weights, packed_format_of
from lowmem_ft.models.files.stored_quantization import BYTES_OF_LEAST
from lowmem_ft.recipe.reading.keys import key_with
from lowmem_ft.recipe.tree import Recipe

_FUTURE_GPU_FACTOR = 2
"""Factor on the memory of the catalogue's largest GPU, beyond which no GPU is expected that the catalogue lacks."""

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "auto": 2}
_QUANTIZED_BYTES = {"nf4": 0.5, "int8": 1}


def check_budget_of_run(recipe: Recipe) -> None:
    """Refuse a budget that a run of the recipe exceeds before its first step, whatever the device turns out to be.

    Raises:
        DoesNotFitError: if the process alone exceeds it, with the weights where these stay on the device.
        UserError: if no device has so much.
    """
    refuse_budget_beyond_all(recipe)
    if recipe.budget.enforce:
        raise_problems(_below_any_process(recipe, _least_weight_bytes(recipe)), DoesNotFitError)


def check_budget_of_plan(recipe: Recipe, gpu: str | None) -> None:
    """Refuse a budget for which no plan can exist.

    Args:
        recipe: the recipe to plan.
        gpu: a name from the catalogue, ``cpu``, or None: whatever this machine has, which only torch knows.

    Raises:
        UserError: if the device has less, or a process alone takes more.
    """
    if gpu is None and not recipe.training.use_cpu:
        refuse_budget_beyond_all(recipe)
        raise_problems(_below_any_process(recipe))
    else:
        named = None if gpu in (None, "cpu") else find_gpu(gpu)
        refuse_budget(recipe.budget, named, named is None, recipe.distributed.per_machine)


def refuse_budget_beyond_all(recipe: Recipe) -> None:
    """Refuse a device budget that is more than any GPU has, and more than this machine.

    Raises:
        UserError: if it is.
    """
    wanted, there = recipe.budget.device, psutil.virtual_memory().total
    largest = max(load_gpus().values(), key=lambda gpu: gpu.memory_bytes)
    most = max(_FUTURE_GPU_FACTOR * largest.memory_bytes, there)
    if wanted is not None and not is_of_size(most, parse_bytes(wanted)):
        raise UserError(beyond_all(wanted))


def beyond_all(wanted: str) -> str:
    """Return the problem with a device budget that no GPU has."""
    largest = max(load_gpus().values(), key=lambda gpu: gpu.memory_bytes)
    return (
        f"budget.device={wanted} is more than any GPU of the catalogue has; the largest, {largest.name}, has "
        f"{format_bytes(largest.memory_bytes)}, and this machine {format_bytes(psutil.virtual_memory().total)}. Lower "
        "it, or leave it out."
    )


def refuse_budget(budget: Budget, gpu: Gpu | None, is_here: bool, num_processes_here: int) -> None:
    """Refuse a budget that a device or its host cannot offer, or that the processes alone exceed.

    Args:
        budget: the memory that may be taken.
        gpu: the device; None: this machine's processor.
        is_here: whether the host is this machine.
        num_processes_here: processes that share the host.

    Raises:
        UserError: if it is one of them.
    """
    raise_problems((*_beyond_device(budget, gpu), *_beyond_host(budget, gpu, is_here, num_processes_here)))


def _beyond_device(budget: Budget, gpu: Gpu | None) -> Iterator[str]:
    above = [*above_device(budget, gpu)]
    yield from above
    if budget.device is None or above:
        return
    least, name = (LIBRARIES_BYTES, "this machine") if gpu is None else (gpu.context_bytes, gpu.name)
    if parse_bytes(budget.device) <= least:
        yield (
            f"budget.device={budget.device} is less than the process takes on {name} before any tensor exists, "
            f"{format_bytes(least)}. Raise it."
        )


def above_device(budget: Budget, gpu: Gpu | None) -> Iterator[str]:
    """Yield problems with a budget of more than a device has; takes the arguments of :func:`refuse_budget`."""
    there, name = (
        (psutil.virtual_memory().total, "this machine") if gpu is None else (gpu.memory_bytes, gpu.name)
    )
    if budget.device is not None and not is_of_size(there, parse_bytes(budget.device)):
        yield (
            f"budget.device={budget.device} is more than {name} has, {format_bytes(there)}. Lower it, or name a larger "
            "GPU with --gpu."
        )


def _beyond_host(budget: Budget, gpu: Gpu | None, is_here: bool, num_processes_here: int) -> Iterator[str]:
    if budget.host is None:
        return
    wanted, there = parse_bytes(budget.host), psutil.virtual_memory().total
    least = num_processes_here * (LIBRARIES_BYTES if gpu is None else HOST_BYTES_WITH_CUDA)
    if wanted <= least:
        who = (
            "the process itself takes"
            if num_processes_here == 1
            else f"{num_processes_here} processes themselves take"
        )
        yield (
            f"budget.host={budget.host} is less than {who}, {format_bytes(least)} with "
            f"{'its' if num_processes_here == 1 else 'their'} libraries before any tensor exists. Raise it."
        )
    elif is_here and wanted > there:
        yield f"budget.host={budget.host} is more than this machine has, {format_bytes(there)}. Lower it."


def _below_any_process(recipe: Recipe, weight_bytes: int = 0) -> Iterator[str]:
    """Yield problems with budgets below what a process takes on any device, with weights that stay on it."""
    contexts = [gpu.context_bytes for gpu in load_gpus().values()]
    on_device = LEAST_PROCESS_BYTES if recipe.training.use_cpu else min(LEAST_PROCESS_BYTES, *contexts)
    for key, size, process_bytes in (
        ("budget.device", recipe.budget.device, on_device),
        ("budget.host", recipe.budget.host, LEAST_PROCESS_BYTES),
    ):
        wanted = process_bytes if size is None else parse_bytes(size)
        if wanted < process_bytes:
            yield (
                f"{key}={size} is less than the process holds before the model is loaded, at least "
                f"{format_bytes(process_bytes)}. Raise it, or leave it out."
            )
        elif size is not None and key == "budget.device" and wanted < process_bytes + weight_bytes:
            yield (
                f"{key}={size} is less than the process and the weights take, at least {format_bytes(process_bytes)} "
                f"and {format_bytes(weight_bytes)}. Raise it; `lowmem-ft plan` with the same settings finds what fits."
            )


def _least_weight_bytes(recipe: Recipe) -> int:
    """Return the bytes of weights that stay on the device; 0 if they are unknown, or a plan may put them elsewhere."""
    model = recipe.model
    if key_with(recipe, "weights on host") or recipe.plan.mode != "none":
        return 0
    embedding, layers = least_weights(model)
    dtype_bytes = _DTYPE_BYTES[model.dtype]
    of_layers = BYTES_OF_LEAST.get(packed_format_of(model) or "", dtype_bytes)
    return round(embedding * dtype_bytes + layers * _QUANTIZED_BYTES.get(model.quantization, of_layers))
