"""The model that a name on the command line means: a model, an adapter with its base, or what a run has trained.

This module does not import torch, so that a command can reject a wrong name before imports that take seconds.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.shard_files import MODEL, shard_files
from lowmem_ft.recipe import Recipe, load_recipe
from lowmem_ft.recipe.checks.path_checks import MODEL_FOLDER, base_of_adapter, recipe_beside
from lowmem_ft.recipe.reading.keys import SHORT_FORMS, key_with, keys_with, recipe_keys
from lowmem_ft.recipe.rules.output_folder import RECIPE_FILE, holds_a_run
from lowmem_ft.techniques.adapters.adapter_folder import CONFIG_FILE
from lowmem_ft.training.folder.checkpoint_folders import find_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """A model that is there to be used.

    Args:
        model: hub id or path of the model, or of the adapter's base, and of the tokenizer that goes with it.
        adapter: the folder of the adapter; None: it is a whole model.
        recipe: the recipe of the run that trained it; None: no run of lowmem_ft is known to have.
    """

    model: ModelConfig
    adapter: Path | None = None
    recipe: Recipe | None = None

    def __str__(self) -> str:
        return (
            f"{self.adapter} on {self.model.name_or_path}" if self.adapter else f"{self.model.name_or_path}"
        )


def find_model(name: str, *, base: str | None = None) -> ModelSource:
    """Return what a name means.

    Args:
        name: a hub id, a model folder, a ``.gguf`` file, the folder of an adapter, or that of a run: its finished
            model, or else its newest complete checkpoint.
        base: the base model of an adapter, if it is not the one that the adapter names.

    Raises:
        UserError: if a run has neither, or its weights in parts; an adapter is invalid, or its base was random.
        ModelError: if an adapter's base is not there.
    """
    named = expand_user(name)
    folder = trained_folder(named)
    recipe = None
    if folder != named:
        recipe = load_recipe(str(named / RECIPE_FILE))
    elif folder.is_dir() and ((folder / CONFIG_FILE).is_file() or (folder / "config.json").is_file()):
        recipe = recipe_beside(folder)
    is_adapter = (folder / CONFIG_FILE).is_file()
    if not is_adapter:
        if base is not None:
            raise UserError(f"--base={base} is the base of an adapter, and {name} is a model. Leave it out.")
        is_local = recipe is not None
        model = ModelConfig(name_or_path=str(folder) if is_local else name, dtype="auto")
        return ModelSource(model=model, recipe=recipe)
    model = base_of_adapter(folder, base=base)
    if (folder / "tokenizer_config.json").is_file():
        model = dataclasses.replace(model, tokenizer_name_or_path=str(folder))
    return ModelSource(model=model, adapter=folder, recipe=recipe)


def trained_folder(folder: Path) -> Path:
    """Return the folder that holds what a run has trained: its finished model, or else its newest complete checkpoint.

    Args:
        folder: that of a run; any other is returned as it is.

    Raises:
        UserError: if the run has neither, or several processes have written the checkpoint, each its part of the
            weights.
    """
    run = folder
    if holds_a_run(run):
        finished = run / MODEL_FOLDER
        if any((finished / file).is_file() for file in ("config.json", CONFIG_FILE)):
            folder = finished
        elif (checkpoint := find_checkpoint(run)) is not None:
            folder = checkpoint
        else:
            raise UserError(
                f"{run} is the folder of a run that has neither a finished model ({MODEL_FOLDER}/) nor a complete "
                "checkpoint. Resume it, or name another folder."
            )
        logger.info("%s holds a run: its %s is used.", run, folder.name)
    if folder.is_dir() and shard_files(folder, MODEL):
        raise UserError(
            f"{folder} holds weights in parts, one for each process of its run. Resume that run to its end, which "
            f"writes {MODEL_FOLDER}/, and name that."
        )
    return folder


_OF_FORWARD = (
    *("data.", "model.dtype", "model.quantization", "model.quantize_partly", "model.attn_implementation"),
    *("model.kernels", "model.trust_remote_code", "loss.chunk_tokens", "tiling.", "offload."),
    *("training.mixed_precision", "training.use_cpu"),
    *("training.per_device_train_batch_size", "training.per_device_eval_batch_size", "training.seed"),
)
"""Keys, and groups of keys, of a run's recipe that a forward pass of its model takes over."""

_WITHOUT_DATA = (
    *("data.path", "data.sources", "data.stopping_strategy", "data.name", "data.revision", "data.data_files"),
    *("data.split", "data.max_samples"),
)
_HELD_OUT = ("data.eval_path", "data.eval_split", "data.eval_size")
"""Keys that go when a user names other data."""


def forward_recipe(source: ModelSource, settings: Iterable[str]) -> Recipe:
    """Return the recipe of forward passes alone: a run's own keys of data, precision and memory, and the settings.

    The rules are those of frozen weights, since nothing is trained: they may be packed, and streamed.

    Args:
        source: the model.
        settings: what a user typed, such as ``model.quantization=nf4``.

    Raises:
        RecipeError: if a setting is wrong, or trains.
    """
    settings = list(settings)
    typed = {SHORT_FORMS.get(key, key) for key in (setting.partition("=")[0] for setting in settings)}
    _refuse_keys_of_training(typed)
    left_out = {*_WITHOUT_DATA, *_HELD_OUT} if typed & {"data.path", "data.sources"} else set[str]()
    left_out |= _offload_left_out(source.recipe)
    kept = []
    for path, key in recipe_keys().items() if source.recipe is not None else ():
        assert source.recipe is not None
        is_kept = path.startswith(_OF_FORWARD) and path not in typed | left_out
        if is_kept and key.value_in(source.recipe) != key.default:
            kept.append(key.setting_in(source.recipe))
    frozen = ["adapter.name=lora", "data.shuffle=false", "data.group_by_length=false"]
    recipe = load_recipe(None, [f"model={source.model.name_or_path}", *frozen, *kept, *settings])
    model = dataclasses.replace(
        recipe.model,
        tokenizer_name_or_path=recipe.model.tokenizer_name_or_path or source.model.tokenizer_name_or_path,
        revision=recipe.model.revision or source.model.revision,
    )
    checkpointing = recipe.checkpointing
    if key_with(recipe, "weights on host"):  # slices of such experts are taken in checkpointed layers alone
        checkpointing = dataclasses.replace(checkpointing, mode="full")
    return dataclasses.replace(recipe, model=model, checkpointing=checkpointing)


def _offload_left_out(recipe: Recipe | None) -> set[str]:
    """Return the keys of what a run kept on the host for its steps; weights there stay there."""
    if recipe is not None and not key_with(recipe, "weights on host"):
        return {path for path in recipe_keys() if path.startswith("offload.")}
    return {*keys_with("state on host"), *keys_with("activations on host")}


def _refuse_keys_of_training(typed: Iterable[str]) -> None:
    allowed, of_steps = (*_OF_FORWARD, "model.", "budget.", "loss."), _offload_left_out(None)
    wrong = sorted(
        key for key in typed if key in recipe_keys() and (not key.startswith(allowed) or key in of_steps)
    )
    if wrong:
        raise UserError(
            f"Nothing is trained here, got {', '.join(wrong)}. Leave {'it' if len(wrong) == 1 else 'them'} out; keys "
            "of data, model, loss, tiling and budget count, and those of weights on the host."
        )
