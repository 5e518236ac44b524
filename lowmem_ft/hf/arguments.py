"""A recipe as ``TrainingArguments`` or as the config of one of TRL's trainers, with upstream's field names."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from lowmem_ft.foundation.errors import UserError, did_you_mean
from lowmem_ft.foundation.packages import require_package
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.recipe.named_recipe import RecipeLike, as_recipe
from lowmem_ft.recipe.reading.keys import key_with, recipe_keys
from lowmem_ft.recipe.trainers.shared_settings import (
    SHARED_SETTINGS,
    keep_overrides,
    plain,
    settings_for_our_loop,
)

if TYPE_CHECKING:
    from transformers import TrainingArguments
    from trl import (
        DistillationConfig,
        DPOConfig,
        GRPOConfig,
        KTOConfig,
        RewardConfig,
        RLOOConfig,
        SFTConfig,
    )

ALIASES = {"gradient_checkpointing": "activation_checkpointing"}
"""Deprecated names of fields, by version of transformers: only one of the two may be given."""

_LAUNCHERS_PRECISION = "ACCELERATE_MIXED_PRECISION"


def training_arguments(recipe: RecipeLike, **overrides: Any) -> TrainingArguments:
    """Return a recipe's ``transformers.TrainingArguments``: all of it that they can express.

    ``hf.attach`` carries techniques and optimizer, ``hf.prepare_model`` the model, and the script its own data;
    ``recipe/trainers/shared_settings.py`` lists each field. HF's own checkpointing flag stays off, as ``attach`` brings
    the recipe's. In vertical order a batch holds all rows of a step, and ``gradient_accumulation_steps`` is 1.

    Args:
        recipe: the recipe to train, or its name or path.
        **overrides: further fields, by their names upstream. They win over the recipe, here and in ``attach``, except
            for techniques, which ``attach`` always applies as the recipe has them.

    Returns:
        The arguments.

    Raises:
        UserError: if a field does not exist or contradicts what ``attach`` will apply; if the recipe asks for what only
            our own loop does; or if the launcher has another mixed precision.
        RecipeError: if the recipe cannot work.
    """
    from transformers import TrainingArguments

    return _made(TrainingArguments, recipe, overrides)


def sft_config(recipe: RecipeLike, **overrides: Any) -> SFTConfig:
    """Return the same as ``trl.SFTConfig``, with the recipe's length of rows, packing, columns and tokens to learn.

    ``data.loss_on=auto`` leaves the choice to TRL, which learns all turns of a chat where our loop learns the
    assistant's.

    Args:
        recipe: as for :func:`training_arguments`.
        **overrides: likewise.

    Returns:
        The config.

    Raises:
        UserError: as :func:`training_arguments`.
        MissingPackageError: if TRL is not installed.
    """
    return _made(_of_trl("SFTConfig"), recipe, overrides)


def dpo_config(recipe: RecipeLike, **overrides: Any) -> DPOConfig:
    """Return the same as ``trl.DPOConfig``, with the recipe's length of rows.

    Args:
        recipe: as for :func:`training_arguments`.
        **overrides: likewise.

    Returns:
        The config.

    Raises:
        UserError: as :func:`training_arguments`.
        MissingPackageError: if TRL is not installed.
    """
    return _made(_of_trl("DPOConfig"), recipe, overrides)


def grpo_config(recipe: RecipeLike, **overrides: Any) -> GRPOConfig:
    """Return the same as ``trl.GRPOConfig``; the overrides set the lengths of prompts and completions.

    Args:
        recipe: as for :func:`training_arguments`.
        **overrides: likewise.

    Returns:
        The config.

    Raises:
        UserError: as :func:`training_arguments`.
        MissingPackageError: if TRL is not installed.
    """
    return _made(_of_trl("GRPOConfig"), recipe, overrides)


def kto_config(recipe: RecipeLike, **overrides: Any) -> KTOConfig:
    """Return the same as ``trl.KTOConfig``, with the recipe's length of rows.

    Args:
        recipe: as for :func:`training_arguments`.
        **overrides: likewise.

    Returns:
        The config.

    Raises:
        UserError: as :func:`training_arguments`.
        MissingPackageError: if TRL is not installed.
    """
    return _made(_of_trl("KTOConfig"), recipe, overrides)


def reward_config(recipe: RecipeLike, **overrides: Any) -> RewardConfig:
    """Return the same as ``trl.RewardConfig``, with the recipe's length of rows.

    Args:
        recipe: as for :func:`training_arguments`.
        **overrides: likewise.

    Returns:
        The config.

    Raises:
        UserError: as :func:`training_arguments`.
        MissingPackageError: if TRL is not installed.
    """
    return _made(_of_trl("RewardConfig"), recipe, overrides)


def rloo_config(recipe: RecipeLike, **overrides: Any) -> RLOOConfig:
    """Return the same as ``trl.RLOOConfig``; the overrides set the lengths of completions.

    Args:
        recipe: as for :func:`training_arguments`.
        **overrides: likewise.

    Returns:
        The config.

    Raises:
        UserError: as :func:`training_arguments`.
        MissingPackageError: if TRL is not installed.
    """
    return _made(_of_trl("RLOOConfig"), recipe, overrides)


def distillation_config(recipe: RecipeLike, **overrides: Any) -> DistillationConfig:
    """Return the same as ``trl.DistillationConfig``; the overrides set the lengths of completions.

    Args:
        recipe: as for :func:`training_arguments`.
        **overrides: likewise.

    Returns:
        The config.

    Raises:
        UserError: as :func:`training_arguments`.
        MissingPackageError: if TRL is not installed.
    """
    return _made(_of_trl("DistillationConfig"), recipe, overrides)


def _of_trl(name: str) -> Any:
    require_package(f"trl.{name}", "trl", "trl")
    import trl

    return getattr(trl, name)


def _made(arguments_class: Any, recipe: RecipeLike, overrides: Mapping[str, Any]) -> Any:
    recipe = as_recipe(recipe)
    check_recipe(recipe)
    known = {field.name for field in dataclasses.fields(arguments_class) if field.init}
    problems = [
        *_unknown(arguments_class.__name__, overrides, known),
        *_refused(recipe),
        *_contradictions(recipe, overrides),
    ]
    if problems:
        raise UserError(*problems)
    fields = {name: value for name, value in _fields(recipe, overrides).items() if name in known}
    for old, new in ALIASES.items():
        if {old, new} <= fields.keys():
            del fields[old if old not in overrides else new]
    if key_with(recipe, "weights on host"):
        arguments_class = _leaving_the_model_on_the_host(arguments_class)
    args = arguments_class(**fields)
    if not {"bf16", "fp16"} & overrides.keys():
        problems = list(_launcher_problems(recipe, args.mixed_precision))
    if problems:
        raise UserError(*problems)
    keep_overrides(args, overrides.keys() & _fields(recipe, {}).keys())
    return args


def _leaving_the_model_on_the_host(arguments_class: Any) -> Any:
    """Return a subclass with which a trainer leaves its model in place: upstream's way is to override this property."""

    def pickled(self: Any) -> Any:
        """Pickle as the class upstream, so that a trainer's checkpoints can be read without this package."""
        return object.__new__, (arguments_class,), vars(self)

    members = {"place_model_on_device": False, "__reduce__": pickled, "__doc__": arguments_class.__doc__}
    return type(arguments_class.__name__, (arguments_class,), members)


def _fields(recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recipe's fields, updated with the overrides."""
    fields: dict[str, Any] = {}
    for row in SHARED_SETTINGS:
        fields.update(row.fields(recipe))
    if overrides.keys() & {"bf16", "fp16"}:  # an override of one replaces both of the recipe's
        del fields["bf16"], fields["fp16"]
    for moment in ("eval", "save"):
        if f"{moment}_steps" in overrides:  # it would be ignored if the recipe has no such steps
            fields[f"{moment}_strategy"] = "steps"
    return {**fields, **overrides}


def _unknown(class_name: str, overrides: Mapping[str, Any], known: set[str]) -> Iterator[str]:
    for name in overrides:
        if name in recipe_keys():
            yield f"{name} is a key of the recipe: set it there, in load_recipe(NAME, ['{name}=...'])."
        elif name not in known:
            yield f"{class_name} has no field {name}.{did_you_mean(name, sorted(known))}"


def _refused(recipe: Recipe) -> Iterator[str]:
    for setting in recipe.undecided_keys:
        yield (
            f"{setting} leaves a choice open, and a trainer's recipe must have all choices made. Run `lowmem-ft plan "
            "--write FILE.yaml`, or hf.attach(trainer, plan='auto', budget='24GiB')."
        )
    for setting, instead in settings_for_our_loop(recipe).items():
        yield f"{setting} is for `lowmem-ft train`, and trainers do not do it. {instead}"


def _contradictions(recipe: Recipe, overrides: Mapping[str, Any]) -> Iterator[str]:
    for row in SHARED_SETTINGS:
        key = recipe_keys()[row.key]
        own = key.value_in(recipe)
        if row.decides != "technique" or (row.follows_default and own == key.default):
            continue
        for name, value in row.fields(recipe).items():
            if name in overrides and plain(overrides[name]) != plain(value):
                yield (
                    f"{name}={overrides[name]} contradicts the recipe's {key.setting(own)}, which hf.attach applies: "
                    f"the field would be ignored or done twice. Leave {name} out, or set {row.key} in the recipe."
                )


def _launcher_problems(recipe: Recipe, chosen: str) -> Iterator[str]:
    """Compare with the launcher's variable, which ``accelerate launch`` always sets, to ``no`` by default."""
    wanted, launched = recipe.training.mixed_precision, os.environ.get(_LAUNCHERS_PRECISION, "no")
    if launched not in ("no", wanted):
        yield (
            f"Two sources disagree on mixed precision: the recipe has training.mixed_precision={wanted}, and "
            f"accelerate (its config, --mixed_precision or {_LAUNCHERS_PRECISION}) has {launched}; the arguments say "
            f"{chosen}. Set training.mixed_precision={launched}, or launch with --mixed_precision {wanted}."
        )
