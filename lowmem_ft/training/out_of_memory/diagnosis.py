"""Diagnosis of a run that ran out of memory: why it was not retried, its largest tensors, where to resume."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lowmem_ft.foundation.catalog.this_machine import this_machines_gpu
from lowmem_ft.foundation.devices import has_bfloat16
from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.system.atomic_write import write_whole_file
from lowmem_ft.foundation.system.device_memory import read_device_memory
from lowmem_ft.foundation.tensors.live_tensors import live_tensors, storage_key
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.folder.replaced_run import allocator_file
from lowmem_ft.training.out_of_memory.error import INSIDE_AN_UPDATE, NotRetried, does_not_fit
from lowmem_ft.training.processes.launch import read_launch
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.session import Session

_NUM_TENSORS = 4


def report_of(
    error: BaseException, session: Session, folder: Path, checkpoint: Path | None, *, process_index: int
) -> list[str]:
    """Return sentences to add to the error of a run; call this while the error still keeps computed tensors alive.

    Args:
        error: the error that was raised.
        session: the run's session.
        folder: the run's folder; on CUDA, the allocator's state is written there.
        checkpoint: the last checkpoint; None: no checkpoint exists.
        process_index: rank of this process; each has its own memory.
    """
    sentences = []
    if session.techniques.is_updating:
        sentences.append(INSIDE_AN_UPDATE)
    elif isinstance(error, NotRetried):
        sentences.append(error.reason)
    device = session.runtime.machine.device
    largest = "; ".join(map(_described, _largest_tensors(session)))
    sentences.append(f"Largest tensors: {largest}.")
    if device.type == "cuda":
        sentences.append(_with_allocator_state(folder / allocator_file(process_index), device))
    if checkpoint is not None:
        sentences.append(
            f"Resume the run from {checkpoint} with training.resume_from_checkpoint=auto and settings that need less; "
            "those that round otherwise, as accumulation.fusion does, need training.resume_with_other_kernels=true."
        )
    return sentences


def does_not_fit_here(
    recipe: Recipe, when: str, runtime: Runtime | None, report: Sequence[str] = ()
) -> DoesNotFitError:
    """Return the error for a run whose device memory has run out, with readings of that device.

    Args:
        recipe: the recipe of the run.
        when: the moment, such as ``at step 1``.
        runtime: the run's runtime; None: it did not exist yet.
        report: the result of :func:`report_of`.
    """
    if runtime is not None:
        device, num_processes = runtime.machine.device, runtime.ranks.num_processes
    else:
        is_on_cuda = torch.cuda.is_available() and not recipe.training.use_cpu
        device = torch.device("cuda" if is_on_cuda else "cpu")
        num_processes = read_launch(use_cpu=recipe.training.use_cpu).num_processes
    others = this_machines_gpu(device).held_by_others_bytes if device.type == "cuda" else None
    return does_not_fit(
        recipe,
        read_device_memory(device),
        when,
        num_processes=num_processes,
        has_bfloat16=has_bfloat16(device),
        held_by_others_bytes=others or 0,
        report=report,
    )


def _largest_tensors(session: Session) -> Iterator[tuple[str, Tensor]]:
    """Yield the largest tensors with their names, one per storage; tensors that only backward keeps are not seen."""
    device, names = session.runtime.machine.device, _names(session)
    by_storage: dict[int, Tensor] = {}
    for tensor in live_tensors():
        storage = storage_key(tensor)
        if tensor.device == device and (storage not in by_storage or id(tensor) in names):
            by_storage[storage] = tensor

    def rank(tensor: Tensor) -> tuple[int, bool]:
        return tensor.untyped_storage().nbytes(), id(tensor) in names  # among equals, those with a name

    for tensor in sorted(by_storage.values(), key=rank, reverse=True)[:_NUM_TENSORS]:
        yield names.get(id(tensor), "intermediate result"), tensor


def _names(session: Session) -> dict[int, str]:
    names = {}
    state = session.optimizer.state
    for name, parameter in session.unwrapped_model.named_parameters():
        names[id(parameter)] = name
        if parameter.grad is not None:
            names[id(parameter.grad)] = f"gradient of {name}"
        for key, value in state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                names[id(value)] = f"{key} of {name}"
    return names | {id(buffer): name for name, buffer in session.unwrapped_model.named_buffers()}


def _described(named: tuple[str, Tensor]) -> str:
    name, tensor = named
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{name} ({dtype} {list(tensor.shape)}, {format_bytes(tensor.untyped_storage().nbytes())})"


def _with_allocator_state(file: Path, device: torch.device) -> str:
    """Write the allocator's segments and blocks to a file, with each block's stack if a user has enabled recording."""
    state = {"stats": torch.cuda.memory_stats(device), "segments": torch.cuda.memory_snapshot()}
    try:
        write_whole_file(file, json.dumps(state))
    except OSError as error:
        return f"The allocator's snapshot could not be written to {file}: {error}."
    return f"A snapshot of the allocator is in {file}."
