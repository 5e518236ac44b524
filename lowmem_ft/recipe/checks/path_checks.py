"""Checks of the paths that a recipe names on this machine's disk, before the libraries whose import takes seconds."""

from __future__ import annotations

import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from lowmem_ft.data.config import DataConfig
from lowmem_ft.data.files.files import columns_of, local_files, read_chat_template
from lowmem_ft.data.files.hub_datasets import require_dataset_within_reach
from lowmem_ft.data.sources.listed import ListedSource, listed_sources, may_be_tokens
from lowmem_ft.data.text.format_choice import choose_format
from lowmem_ft.foundation.errors import DataError, UserError, raise_problems, raise_together
from lowmem_ft.foundation.packages import is_installed
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.models.files.hub_names import require_tokenizer_within_reach, require_within_reach
from lowmem_ft.models.files.local_paths import check_model_path, check_tokenizer_path
from lowmem_ft.models.files.model_files import (
    architecture_fields,
    check_weight_files,
    damage,
    limit_of_positions,
    num_layers_of,
    refuse_unfit,
    text_fields,
)
from lowmem_ft.recipe.loading import load_recipe
from lowmem_ft.recipe.rules.output_folder import RECIPE_FILE, refuse_output_folder, run_folder_of
from lowmem_ft.recipe.training_config import require_tracker
from lowmem_ft.recipe.tree import Recipe
from lowmem_ft.techniques.adapters.adapter_folder import CONFIG_FILE, WEIGHTS_FILE, read_adapter_config

MODEL_FOLDER = "model"
"""The folder, inside a run's folder, for the finished model or its adapters."""

PROBED_BYTES = 4096
"""Bytes written and deleted again: a full disk lets files be created, and refuses their content."""


def check_paths_of_run(recipe: Recipe) -> None:
    """Refuse a run whose files or packages are missing, or whose folders are not writable; hub names pass.

    Raises:
        UserError: lists all problems.
    """
    of_model: list[Callable[[], object]] = []
    if not _goes_on_from_a_checkpoint(recipe):
        of_model = [
            lambda: check_model_files(recipe),
            lambda: check_tokenizer_path(recipe.model),
            lambda: require_tokenizer_within_reach(recipe.model),
            lambda: check_sizes_of_model(recipe, is_planned=recipe.plan.mode != "none"),
        ]
    raise_together(
        *_packages_of_step(recipe),
        *(functools.partial(require_tracker, name) for name in recipe.training.report_to),
        lambda: _require_flash_attention(recipe.model),
        *of_model,
        *_checks_of_data(recipe),
        lambda: _require_prompts(recipe),
        *_checks_of_folders(recipe),
    )


def check_paths_of_rehearsal(recipe: Recipe) -> None:
    """Refuse a rehearsal whose data or tokenizer is missing, or whose folder no run may have.

    The model's config suffices, and the folder need not be writable.

    Raises:
        UserError: lists all problems.
    """
    raise_together(
        *_packages_of_step(recipe),
        lambda: check_model_files(recipe, architecture_only=True),
        lambda: check_tokenizer_path(recipe.model),
        lambda: require_tokenizer_within_reach(recipe.model),
        lambda: check_sizes_of_model(recipe),
        *_checks_of_data(recipe),
        lambda: _require_prompts(recipe),
        lambda: refuse_output_folder(recipe),
    )


def check_paths_of_data(recipe: Recipe) -> None:
    """Refuse to look at data that is missing, or that no tokenizer is there for; the model's other files are not used.

    Raises:
        UserError: lists all problems.
    """
    of_tokenizer = [
        lambda: check_tokenizer_path(recipe.model),
        lambda: require_tokenizer_within_reach(recipe.model),
    ]
    raise_together(
        *([] if may_be_tokens(recipe.data) else of_tokenizer),
        lambda: recipe.data.refuse_positions(limit_of_positions(text_fields(recipe.model).get)),
        *_checks_of_data(recipe),
    )


def check_paths_of_evaluation(recipe: Recipe, *, reads_data: bool = True) -> None:
    """Refuse the forward passes of a model whose files, data or packages are missing.

    Args:
        recipe: names the model, and the data.
        reads_data: whether data is read.

    Raises:
        UserError: lists all problems.
    """
    raise_together(
        *_packages_of_step(recipe),
        lambda: _require_flash_attention(recipe.model),
        lambda: check_model_files(recipe),
        lambda: check_tokenizer_path(recipe.model),
        lambda: require_tokenizer_within_reach(recipe.model),
        *([lambda: check_sizes_of_model(recipe), *_checks_of_data(recipe)] if reads_data else []),
    )


def check_packages(recipe: Recipe) -> None:
    """Refuse a recipe whose step cannot be built here, even on a virtual GPU; trackers are not checked.

    Raises:
        UserError: if a package is not installed.
    """
    raise_together(*_packages_of_step(recipe))


def check_model_files(recipe: Recipe, *, architecture_only: bool = False) -> None:
    """Refuse a model that is missing, incomplete, or not a decoder.

    Args:
        recipe: the recipe that names the model.
        architecture_only: whether no weights will be read, so that the catalogue's architectures suffice.

    Raises:
        UserError: if anything is wrong.
    """
    config = recipe.model
    check_model_path(config)
    refuse_unfit(config)
    if not architecture_only:
        check_weight_files(config)
    if not (architecture_only and architecture_fields(config)):
        require_within_reach(config)


def check_sizes_of_model(recipe: Recipe, *, is_planned: bool = False) -> None:
    """Refuse settings that a model is too small for, as far as its files or the catalogue tell its sizes.

    Args:
        recipe: the recipe that names the model.
        is_planned: whether the checkpointed layers are still to be chosen.

    Raises:
        UserError: if anything is wrong.
    """
    fields = text_fields(recipe.model)
    vocabulary, hidden_size = fields.get("vocab_size"), fields.get("hidden_size")
    num_layers = num_layers_of(fields.get)
    checks: list[Callable[[], object]] = [
        lambda: recipe.data.refuse_positions(limit_of_positions(fields.get))
    ]
    if isinstance(vocabulary, int):
        checks.append(lambda: recipe.tiling.refuse_vocabulary(vocabulary))
    if isinstance(hidden_size, int) and hidden_size > 0:
        checks.append(lambda: recipe.adapter.refuse_rank(hidden_size))
    if num_layers is not None and not is_planned:
        checks.append(lambda: raise_problems(recipe.checkpointing.problems_with(num_layers)))
    raise_together(*checks)


def check_merge(adapter: Path, target: Path, *, base: str | None) -> ModelConfig:
    """Refuse an invalid adapter, a missing base, and a target folder that is in use or not writable.

    Args:
        adapter: the adapter's folder.
        target: the new model's folder.
        base: the base model, if it is not the one that the adapter names.

    Returns:
        The config of the base model.

    Raises:
        UserError: if anything is wrong with the adapter or the target, or the adapter's base was random.
        ModelError: if the base is named by a path and is not there.
    """
    check_new_folder(target)
    return base_of_adapter(adapter, base=base)


def check_new_folder(target: Path) -> None:
    """Refuse a folder for a new model that is in use or not writable.

    Raises:
        UserError: if it is a file, not empty, or the system refuses to write there.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} exists already, and is not empty. Name a new folder for the model.")
    _require_writable(target, "OUT_DIR")


def base_of_adapter(adapter: Path, *, base: str | None = None) -> ModelConfig:
    """Return the config of an adapter's base model; refuse an invalid adapter and a missing base.

    Args:
        adapter: the adapter's folder.
        base: the base model, if it is not the one that the adapter names.

    Raises:
        UserError: if anything is wrong with the adapter, or its base was random.
        ModelError: if the base is named by a path and is not there.
    """
    settings = read_adapter_config(adapter, model_folder=MODEL_FOLDER)
    if not base:
        _refuse_random_base(adapter)
    name = base or settings.get("base_model_name_or_path")
    if not name:
        raise UserError(f"{adapter / CONFIG_FILE} does not name its base model. Pass it with --base.")
    config = check_plain_model(name, revision=None if base else settings.get("revision"))
    if problem := damage(adapter / WEIGHTS_FILE):
        raise UserError(
            f"The weights of {adapter} are damaged: {WEIGHTS_FILE} {problem}. Save the adapter again."
        )
    return config


def check_plain_model(name: str, *, revision: str | None = None) -> ModelConfig:
    """Refuse a model that is missing, incomplete or no decoder; return the config that loads it in its own type.

    Raises:
        ModelError: if it cannot be read.
    """
    config = ModelConfig(name_or_path=name, revision=revision, dtype="auto")
    check_model_path(config)
    refuse_unfit(config)
    check_weight_files(config)
    require_within_reach(config)
    return config


def recipe_beside(adapter: Path) -> Recipe | None:
    """Return the recipe of the run that an adapter's folder, or a checkpoint, is in; None: it has moved away."""
    file = adapter.resolve().parent / RECIPE_FILE
    return load_recipe(str(file)) if file.is_file() else None


def _refuse_random_base(adapter: Path) -> None:
    """Refuse a random base: weights of the same name would differ, or do not exist."""
    recipe = recipe_beside(adapter)
    if recipe is not None and recipe.model.weights == "random":
        raise UserError(
            f"An adapter belongs to the base weights that it was trained on. Those of {adapter} were random "
            f"(model.weights=random in {adapter.resolve().parent / RECIPE_FILE}), and no run keeps them. Train it "
            "with model.weights=pretrained, or train all weights with adapter.name=none."
        )


def _require_writable(folder: Path, setting: str) -> None:
    """Refuse a folder that cannot be written to or created; nothing is left behind.

    Args:
        folder: an existing folder, or one to create with its parents.
        setting: the setting that names it, for the message.

    Raises:
        UserError: if a file is in its way, or the system refuses to write there.
    """
    nearest = folder.absolute()
    while not nearest.exists() and not nearest.is_symlink():
        nearest = nearest.parent
    if not nearest.is_dir():
        kind = "a file"
        if nearest.is_symlink() and not nearest.exists():
            kind = f"a link to {os.readlink(nearest)}, which does not exist"
        what = f"is {kind}" if nearest == folder.absolute() else f"is below {nearest}, which is {kind}"
        raise UserError(f"{setting}={folder} {what}. Name a folder.")
    try:
        with tempfile.TemporaryFile(dir=nearest) as probe:
            probe.write(bytes(PROBED_BYTES))
            probe.flush()
    except OSError as error:
        raise UserError(
            f"{setting}={folder} cannot be written: {error.strerror} in {nearest}. Name a writable folder on a disk "
            "with free space."
        ) from error


def _goes_on_from_a_checkpoint(recipe: Recipe) -> bool:
    """Check whether model and tokenizer come from a checkpoint, not their old paths; one of adapters has no model."""
    wanted = recipe.training.resume_from_checkpoint
    if recipe.adapter.name != "none" or wanted is None:
        return False
    return wanted != "auto" or any(run_folder_of(recipe).glob("checkpoint-*"))


def _packages_of_step(recipe: Recipe) -> list[Callable[[], object]]:
    return [config.require_packages for config in (recipe.model, recipe.adapter, recipe.optimizer)]


def _require_flash_attention(config: ModelConfig) -> None:
    """Require the package whose kernels only training needs, and no estimate."""
    if config.attn_implementation == "flash_attention_2" and not is_installed("flash-attn"):
        raise UserError(
            "model.attn_implementation=flash_attention_2 needs a CUDA device and the package flash-attn, which is not "
            "installed. Run: pip install flash-attn --no-build-isolation; or set model.attn_implementation=auto."
        )


def _checks_of_data(recipe: Recipe) -> Iterator[Callable[[], object]]:
    config = recipe.data
    yield lambda: _require_data(config)
    if not any(source.get("path") in (None, "") for source in config.sources or ()):  # reported already
        for listed in listed_sources(config):
            yield lambda listed=listed: _check_source(listed)
    if config.eval_path is not None:
        yield lambda path=config.eval_path: _check_files(config, path, "data.eval_path")
    if config.chat_template is not None:
        yield lambda template=config.chat_template: read_chat_template(template)


def _check_source(listed: ListedSource) -> None:
    with listed.named_in_errors():
        _check_files(listed.config, listed.path, "data.path")


def _check_files(config: DataConfig, path: str, setting: str) -> None:
    """Check splits and columns by the beginning of a file; those of folders and hub names are checked later."""
    files = local_files(path, setting=setting)
    if files is None:
        require_dataset_within_reach(path, setting)
        return
    splits = {"data.split": config.split} if setting == "data.path" else {}
    if config.eval_split is not None and (setting == "data.eval_path") == (config.eval_path is not None):
        splits["data.eval_split"] = config.eval_split
    for key, split in splits.items():
        if re.fullmatch(r"\w+", split) and split != "train":
            raise DataError(
                f"{key}={split} is not in {path}: a local file has only the split train. Use it, or a slice of it "
                "such as train[:10%]; data.eval_size=0.1 holds out a part of it."
            )
    columns = columns_of(files[0], setting)
    if columns is not None and len(files) == 1:
        choose_format(config, columns, path)


def _require_data(config: DataConfig) -> None:
    if not config.is_named:
        raise DataError("data.path names the training data, got null. Set data=FILE or data=HUB_NAME.")


def _require_prompts(recipe: Recipe) -> None:
    setting, path = "training.generation_prompts", recipe.training.generation_prompts
    if path is not None and local_files(path, setting=setting) is None:
        raise DataError(f"{setting} is a file on this machine, got {path}. Name one.")


def _checks_of_folders(recipe: Recipe) -> Iterator[Callable[[], object]]:
    yield lambda: refuse_output_folder(recipe)
    yield lambda: _require_writable(run_folder_of(recipe), "training.output_dir")
    checkpoint = recipe.training.resume_from_checkpoint
    if checkpoint not in (None, "auto"):
        yield lambda: _require_checkpoint(expand_user(checkpoint))
    if recipe.offload.folder is not None:
        yield lambda folder=recipe.offload.folder: _require_folder(expand_user(folder))


def _require_checkpoint(folder: Path) -> None:
    """Require the folder; its completeness is checked later, with its content."""
    if not folder.is_dir():
        raise UserError(
            f"training.resume_from_checkpoint={folder} is not a folder. Name a checkpoint-N of a run, or auto for the "
            "newest in training.output_dir."
        )


def _require_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(
            f"offload.folder must be an existing folder, got {folder}. Create it, on a fast local disk."
        )
    _require_writable(folder, "offload.folder")
