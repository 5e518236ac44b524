"""Files of a sharded session: each process writes its own part of a checkpoint.

The finished model is an ordinary model folder, whose weights are gathered one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedTokenizerBase

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.tensors.finiteness import some_of
from lowmem_ft.foundation.tensors.local_shards import first_element, is_held_once, local_part
from lowmem_ft.models.files.shard_files import MODEL, OPTIMIZER, Part, ShardWriter, cut_tensors, shard_files
from lowmem_ft.models.gathering import saved_tensors, write_gathered_weights
from lowmem_ft.models.other_parts import name_in_files
from lowmem_ft.models.saving import save_config, save_tokenizer, verify_saved_model
from lowmem_ft.optimizers import OptimizerState, export_optimizer_state
from lowmem_ft.training.step.session import Session


def save_gathered(
    session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, *, is_main: bool
) -> None:
    """Write trained weights and tokenizer so that vanilla libraries load them; every process calls this.

    Raises:
        CheckpointError: if the folder, read back, does not hold the weights.
        OSError: if it cannot be written.
    """
    with session.techniques.at_rest():
        if session.techniques.save(folder, writes=is_main):
            if is_main:
                save_tokenizer(tokenizer, folder)
            return
        model = session.unwrapped_model
        write_gathered_weights(model, folder, writes=is_main)
        if is_main:
            save_config(model, folder)
            save_tokenizer(tokenizer, folder)
            verify_saved_model(model, folder)


def save_shards(
    session: Session, tokenizer: PreTrainedTokenizerBase, folder: Path, writer: ShardWriter, *, is_main: bool
) -> dict[str, Any]:
    """Write this process's part of the weights and the optimizer's state; every process calls this.

    Args:
        session: the session to save.
        tokenizer: the tokenizer, which the main process writes, as it does the model's config.
        folder: the folder that all processes write to.
        writer: the writer of this process.
        is_main: whether this is the main process, which writes every file that is written once.

    Returns:
        The optimizer's values that are not tensors.

    Raises:
        OSError: if it cannot be written.
    """
    model = session.unwrapped_model
    with session.techniques.at_rest():
        is_written = session.techniques.save(folder, writes=is_main)  # first: adapters are gathered
        if is_main:
            save_tokenizer(tokenizer, folder)
        if not is_written and is_main:
            save_config(model, folder)
        weights = {} if is_written else saved_tensors(model)
        return write_parts(model, weights, session.optimizer, writer, is_main=is_main)


def write_parts(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    optimizer: Optimizer,
    writer: ShardWriter,
    *,
    is_main: bool,
) -> dict[str, Any]:
    """Write this process's part of weights and of an optimizer's state; every process calls this.

    Args:
        model: the model, whose parameters the optimizer holds.
        weights: the weights and buffers to write, by their names in the model.
        optimizer: the optimizer itself, not Accelerate's wrapper.
        writer: the writer of this process.
        is_main: whether this process also writes what every process holds.

    Returns:
        The optimizer's values that are not tensors.

    Raises:
        OSError: if a file cannot be written.
    """
    writer.write(MODEL, _weights(model, weights, is_main=is_main))
    state = export_optimizer_state(optimizer, model.named_parameters())
    writer.write(OPTIMIZER, _state(state, is_main=is_main))
    return state.scalars


@torch.no_grad()
def read_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Read this process's part of weights and buffers, which any number of processes have written.

    Args:
        folder: a folder with the files of :func:`write_parts`.
        weights: what to set, by its names in the model.

    Raises:
        CheckpointError: if the files do not hold all of it, in these shapes.
    """
    saved = cut_tensors(shard_files(folder, MODEL))
    differ = [
        name
        for name, tensor in weights.items()
        if name not in saved or saved[name].get_shape() != list(tensor.shape)
    ]
    if differ:
        raise CheckpointError(
            f"{folder} does not hold {some_of(differ)} in the shape that this run trains. Resume with the model and "
            "the adapters that wrote it, or from another checkpoint."
        )
    for name, tensor in weights.items():
        here = local_part(tensor)
        if here.numel():
            first = first_element(tensor) * len(tensor) // tensor.numel() if tensor.ndim else 0
            here.copy_(saved[name][first : first + len(here)] if tensor.ndim else saved[name][...])


def _weights(model: nn.Module, weights: Mapping[str, Tensor], *, is_main: bool) -> Iterator[tuple[str, Part]]:
    """Yield this process's parts of the weights; the main process also yields weights that every process holds."""
    for own_name, tensor in weights.items():
        name, here = name_in_files(model, own_name), local_part(tensor)
        if not is_held_once(tensor):
            if is_main:
                yield name, Part(here, [0] * tensor.ndim, tensor.shape)
        elif here.numel():
            first_row = first_element(tensor) // (tensor.numel() // tensor.shape[0])
            yield name, Part(here, [first_row, *[0] * (tensor.ndim - 1)], tensor.shape)


def _state(state: OptimizerState, *, is_main: bool) -> Iterator[tuple[str, Part]]:
    for name, tensor in state.tensors.items():
        if name not in state.places:
            if is_main:
                yield name, Part(tensor, [0] * tensor.ndim, tensor.shape)
        elif tensor.numel():
            begins, length = state.places[name]
            yield name, Part(tensor, [begins], [length])
