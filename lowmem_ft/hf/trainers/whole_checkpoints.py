"""Trainer checkpoints that are whole or absent, like our own: each gets its final name last.

``Trainer`` writes file by file into ``checkpoint-N``, and resumes from the folder with the highest number. If the
process was killed in a save, that folder is incomplete.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.handle import Handle
from lowmem_ft.foundation.system.atomic_write import incomplete_name, whole_folder
from lowmem_ft.foundation.tensors.local_shards import is_sharded
from lowmem_ft.models.files.shard_files import OPTIMIZER, shard_files
from lowmem_ft.techniques.modules.patching import call_around
from lowmem_ft.training.folder.own_files import replace_saved

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)")


def save_whole(trainer: Any) -> Iterator[Callable[[], object]]:
    """Let a trainer write each checkpoint under another name until it is complete, and yield the calls that undo this.

    Args:
        trainer: a trainer of any kind; with several processes, call it in each.
    """
    yield call_around(trainer, "_save_checkpoint", functools.partial(_save_whole, trainer))
    yield call_around(trainer, "_load_from_checkpoint", functools.partial(_load_whole, trainer))
    yield call_around(trainer, "_load_best_model", functools.partial(_load_best, trainer))


def _save_whole(trainer: Any, save: Callable[..., None], model: Any, trial: Any) -> None:
    run_dir, state = trainer._get_output_dir(trial), trainer.state
    folder = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
    if state.best_global_step == state.global_step:  # the trainer looks for the folder before it exists
        state.best_model_checkpoint = folder
    with contextlib.ExitStack() as writing:
        if trainer.args.should_save:
            _delete_cut_short(Path(run_dir))
            writing.enter_context(whole_folder(Path(folder), replace_saved))
        trainer.accelerator.wait_for_everyone()
        with Handle(*_written_elsewhere(trainer, folder, finish=writing.close)):
            save(model, trial)


def _written_elsewhere(
    trainer: Any, folder: str, *, finish: Callable[[], None]
) -> Iterator[Callable[[], object]]:
    """Redirect writes from a folder to its incomplete name; the trainer's state, the last file, completes it."""
    incomplete = incomplete_name(Path(folder))

    def elsewhere(
        after: Callable[[], object],
        write: Callable[..., Any],
        path: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if path is not None and Path(path).is_relative_to(folder):
            path = str(incomplete / Path(path).relative_to(folder))
        write(path, *args, **kwargs)
        after()

    for name in ("save_model", "_save_optimizer_and_scheduler", "_save_scaler"):
        yield call_around(trainer, name, functools.partial(elsewhere, lambda: None))
    # Every process writes one of these, and the main process continues to the end.
    all_there = trainer.accelerator.wait_for_everyone
    yield call_around(trainer, "_save_rng_state", functools.partial(elsewhere, all_there))
    yield call_around(trainer.state, "save_to_json", functools.partial(elsewhere, finish))


def _delete_cut_short(run_dir: Path) -> None:
    """Delete what a killed process was writing: the trainer would count it among its checkpoints."""
    for path in run_dir.iterdir() if run_dir.is_dir() else ():
        if path.is_dir() and _NUMBERED.fullmatch(path.stem) and path == incomplete_name(path.with_suffix("")):
            shutil.rmtree(path)


def _load_whole(trainer: Any, load: Callable[..., None], checkpoint: str, *args: Any, **kwargs: Any) -> None:
    folder = Path(checkpoint)
    if folder.is_dir() and not (folder / TRAINER_STATE_NAME).is_file():
        whole = [path for path in folder.parent.iterdir() if _is_whole(path) and path != folder]
        newest = max(whole, key=lambda path: int(path.name.rpartition("-")[2]), default=None)
        way_out = f"resume from {newest}" if newest else "start from scratch"
        raise UserError(
            f"A trainer writes {TRAINER_STATE_NAME} last into a checkpoint, but {folder} does not have it: the "
            f"save was interrupted. Delete the folder, and {way_out}."
        )
    if folder.is_dir() and not ((folder / OPTIMIZER_NAME).is_file() or shard_files(folder, OPTIMIZER)):
        logger.warning(
            "%s has weights but no optimizer state, as with save_only_model: the optimizer starts from scratch.",
            folder,
        )
    if not _load_renamed(trainer.model, folder):
        load(checkpoint, *args, **kwargs)


def _load_best(trainer: Any, load: Callable[..., None]) -> None:
    best = trainer.state.best_model_checkpoint
    if best is None or not _load_renamed(trainer.model, Path(best)):
        load()


def _load_renamed(model: Any, folder: Path) -> bool:
    """Load weights whose files have the names of the hub, where the model's own are others; False: they are the same.

    transformers saves experts one by one and language models next to towers by their former names. Its trainer reads
    such files as if they had the model's names, and leaves the weights as they were, with a warning (5.23).
    """
    names = _names_in(folder)
    is_cut = any(map(is_sharded, model.parameters()))
    if is_cut or not isinstance(model, PreTrainedModel) or names <= model.state_dict().keys():
        return False
    types = {parameter.dtype for parameter in model.parameters()}
    (dtype,) = types if len(types) == 1 else (torch.float32,)
    config = copy.deepcopy(model.config)
    model.load_state_dict(type(model).from_pretrained(folder, config=config, dtype=dtype).state_dict())
    return True


def _names_in(folder: Path) -> set[str]:
    """Return the names of a folder's weights; empty if it has none of a whole model in safetensors."""
    names: set[str] = set()
    for path in folder.glob("model*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names


def _is_whole(path: Path) -> bool:
    return bool(_NUMBERED.fullmatch(path.name)) and (path / TRAINER_STATE_NAME).is_file()
