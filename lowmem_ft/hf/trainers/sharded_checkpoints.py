"""Checkpoints of a trainer whose processes share a model by FSDP 2, read by any number of processes.

The folder is a trainer's: a whole model or adapter for ``from_pretrained``, schedule, random states, the trainer's
state. In place of torch's files of a sharded model and optimizer, each process writes its own rows of what is trained
and of its state (``training/folder/sharded_files.py``). One process without FSDP resumes from such a folder, too.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import StateDictType
from transformers.trainer import SCHEDULER_NAME

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.tensors.local_shards import whole_tensor
from lowmem_ft.models.files.shard_files import MODEL, OPTIMIZER, ShardWriter, cut_tensors, shard_files
from lowmem_ft.models.gathering import saved_tensors
from lowmem_ft.optimizers import import_optimizer_state
from lowmem_ft.techniques.adapters.peft_layers import tensors_of_adapters
from lowmem_ft.techniques.modules.patching import call_around, set_attribute
from lowmem_ft.training.checkpoints.checkpoint import explaining_write_errors
from lowmem_ft.training.folder.run_files import saved_state
from lowmem_ft.training.folder.sharded_files import read_weights, write_parts
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.step.enabled_techniques import EnabledTechniques

_VALUES = "sharded-state.json"
"""The optimizer's values that are not tensors."""


def save_in_parts(trainer: Any, enabled: EnabledTechniques, ranks: Ranks) -> Iterator[Callable[[], object]]:
    """Let every process of a sharded trainer write and read its own rows; yield the calls that undo it.

    ``save_model`` gathers one weight at a time, on the host of the process that writes, whatever FSDP's
    ``state_dict_type``.
    """

    def save(stock: Callable[..., None], output_dir: str) -> None:
        _save(trainer, enabled, ranks, Path(output_dir))

    def load(stock: Callable[..., None], checkpoint: str, *_: Any, **__: Any) -> None:
        _load_weights(trainer.model, Path(checkpoint))

    def load_best(stock: Callable[..., None]) -> None:
        _load_weights(trainer.model, Path(trainer.state.best_model_checkpoint))

    yield set_attribute(
        trainer.accelerator.state.fsdp_plugin, "state_dict_type", StateDictType.FULL_STATE_DICT
    )
    yield call_around(trainer.accelerator, "get_state_dict", partial(_gathered, trainer))
    yield call_around(trainer, "_save_optimizer_and_scheduler", save)
    yield call_around(trainer, "_load_from_checkpoint", load)
    yield call_around(trainer, "_load_best_model", load_best)


def load_parts(trainer: Any, enabled: EnabledTechniques) -> Iterator[Callable[[], object]]:
    """Let a trainer read an optimizer's state that several processes have written; yield the call that undoes it."""

    def load(stock: Callable[..., None], checkpoint: str | None) -> None:
        if checkpoint is None or not shard_files(Path(checkpoint), OPTIMIZER):
            stock(checkpoint)
        else:
            _load_state(trainer, enabled, Path(checkpoint))

    yield call_around(trainer, "_load_optimizer_and_scheduler", load)


def _save(trainer: Any, enabled: EnabledTechniques, ranks: Ranks, folder: Path) -> None:
    identity = ranks.gather([secrets.token_hex(8)])[0]
    writer = ShardWriter(folder, identity, ranks.process_index, ranks.num_processes)
    way_out = "Earlier checkpoints are untouched; free some space, then resume from the last one."
    with ranks.failing_together(), explaining_write_errors(folder, way_out):
        model = trainer.model
        values = write_parts(model, _trained(model), enabled.optimizer, writer, is_main=ranks.is_main)
        if trainer.args.should_save:
            (folder / _VALUES).write_text(json.dumps(values))
            torch.save(trainer.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)


def _load_weights(model: Any, folder: Path) -> None:
    if not shard_files(folder, MODEL):
        raise CheckpointError(
            f"{folder} does not have the parts of weights that hf.attach() saves under FSDP 2: it was saved without "
            "it, without FSDP, or with save_only_model. Resume from one that was saved with them, or start from its "
            "weights, with from_pretrained()."
        )
    read_weights(folder, _trained(model))


def _load_state(trainer: Any, enabled: EnabledTechniques, folder: Path) -> None:
    state = saved_state(folder, json.loads((folder / _VALUES).read_text()))
    weights = cut_tensors(shard_files(folder, MODEL))

    def saved_weight(name: str) -> Tensor | None:
        return weights[name][...] if name in weights else None

    import_optimizer_state(enabled.optimizer, trainer.model.named_parameters(), state, saved_weight)
    schedule = torch.load(folder / SCHEDULER_NAME, weights_only=True)
    trainer.lr_scheduler.load_state_dict(schedule)


def _trained(model: Any) -> dict[str, Tensor]:
    """Return what a checkpoint holds of a model, by name: all of it, or a PEFT model's trained weights."""
    if hasattr(model, "peft_config"):
        return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return saved_tensors(model)


def _gathered(
    trainer: Any, stock: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """Return the weights that ``save_pretrained`` writes, in the writing process; every process calls this."""
    if model is not trainer.model:
        return stock(model, *args, **kwargs)
    gathered = {}
    saved = tensors_of_adapters(model) if hasattr(model, "peft_config") else saved_tensors(model)
    for name, tensor in saved.items():
        whole = whole_tensor(tensor)
        if trainer.args.should_save:
            gathered[name] = whole.detach().cpu()
    return gathered
