"""Files of a sharded session: each process writes its own part of a checkpoint.

The finished model is an ordinary model folder, whose weights are gathered one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowmem_ft.foundation.tensors.local_shards import first_element, is_held_once, local_part
from lowmem_ft.models.files.shard_files import MODEL, OPTIMIZER, Part, ShardWriter
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
        if not is_written:
            if is_main:
                save_config(model, folder)
            writer.write(MODEL, _weights(model, is_main=is_main))
        state = export_optimizer_state(session.optimizer, model.named_parameters())
        writer.write(OPTIMIZER, _state(state, is_main=is_main))
    return state.scalars


def _weights(model: PreTrainedModel, *, is_main: bool) -> Iterator[tuple[str, Part]]:
    """Yield this process's parts of the weights; the main process also yields weights that every process holds."""
    for own_name, tensor in saved_tensors(model).items():
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
