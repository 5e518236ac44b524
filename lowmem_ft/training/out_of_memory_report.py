"""What there is to say of a run whose memory ran out: why it was not retried, what was largest, where to go on from."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lowmem_ft.training.out_of_memory import INSIDE_AN_UPDATE, NotRetried
from lowmem_ft.training.replaced_run import ALLOCATOR_FILE
from lowmem_ft.training.session import Session
from lowmem_ft.units import format_bytes

_NUM_TENSORS = 4


def report_of(error: BaseException, session: Session, folder: Path, checkpoint: Path | None) -> list[str]:
    """Sentences to add to the error of a run; call it while the error still holds what was computed.

    Args:
        error: which was raised.
        session: of the run.
        folder: of the run; on CUDA, the allocator's state is written there.
        checkpoint: the last; None: there is none.
    """
    sentences = []
    if session.techniques.is_updating:
        sentences.append(INSIDE_AN_UPDATE)
    elif isinstance(error, NotRetried):
        sentences.append(error.reason)
    device = session.runtime.device
    largest = "; ".join(map(_described, _largest_tensors(session)))
    sentences.append(f"Largest tensors: {largest}.")
    if device.type == "cuda":
        sentences.append(f"All that the allocator held is in {_write_allocator_state(folder, device)}.")
    if checkpoint is not None:
        sentences.append(
            f"The run goes on from {checkpoint} with training.resume_from_checkpoint=auto and settings that need less."
        )
    return sentences


def _largest_tensors(session: Session) -> Iterator[tuple[str, Tensor]]:
    """By the name of what they are, one for each storage; what backward alone keeps is not seen."""
    device, names = session.runtime.device, _names(session)
    by_storage: dict[int, Tensor] = {}
    for tensor in _living_tensors():
        if tensor.device != device:
            continue
        storage = tensor.untyped_storage()._cdata
        if storage not in by_storage or id(tensor) in names:
            by_storage[storage] = tensor

    def rank(tensor: Tensor) -> tuple[int, bool]:
        return tensor.untyped_storage().nbytes(), id(tensor) in names  # of equals those that have a name

    for tensor in sorted(by_storage.values(), key=rank, reverse=True)[:_NUM_TENSORS]:
        yield names.get(id(tensor), "computed on the way"), tensor


def _living_tensors() -> Iterator[Tensor]:
    # Not isinstance, which wakes modules that are imported when they are asked for something.
    return (found for found in gc.get_objects() if issubclass(type(found), Tensor))


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


def _write_allocator_state(folder: Path, device: torch.device) -> Path:
    """With the stack of each block, if somebody has switched their recording on."""
    file = folder / ALLOCATOR_FILE
    state = {"stats": torch.cuda.memory_stats(device), "segments": torch.cuda.memory_snapshot()}
    file.write_text(json.dumps(state))
    return file
