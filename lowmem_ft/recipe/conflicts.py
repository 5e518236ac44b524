"""Rules across parts: what one key asks of another. A new rule is a function and a row of ``CONFLICTS``."""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from lowmem_ft.errors import RecipeError, UserError, did_you_mean
from lowmem_ft.recipe.keys import accepts_none, recipe_groups, recipe_keys
from lowmem_ft.recipe.tree import Recipe
from lowmem_ft.units import parse_bytes


def check_recipe(recipe: Recipe) -> None:
    """Refuse a recipe that cannot work, such as one put together in Python.

    Args:
        recipe: any recipe; those from ``load_recipe`` have been checked already.

    Raises:
        RecipeError: if a value is out of its range or two values exclude each other; lists all of it.
    """
    problems = recipe_problems(recipe)
    if problems:
        raise RecipeError(*problems)


def recipe_problems(recipe: Recipe, unreliable: Collection[str] = ()) -> list[str]:
    """What is wrong with a recipe: each part by its own rules, then the rules across parts.

    Args:
        recipe: any recipe.
        unreliable: dotted keys and groups that hold a stand-in for a value nobody could read: rules about
            these are passed over.

    Returns:
        One sentence a problem; empty if the recipe can work.
    """
    problems = _empty_names(recipe)
    for group in recipe_groups():
        own_rules: Callable[[], list[str]] | None = getattr(getattr(recipe, group), "problems", None)
        if own_rules is not None:
            problems += [rule for rule in own_rules() if not _names_any(rule, unreliable)]
    for conflict in CONFLICTS:
        involved = {*conflict.keys, *(key.partition(".")[0] for key in conflict.keys)}
        if involved.isdisjoint(unreliable):
            problem = conflict.rule(recipe)
            problems += [problem] if problem else []
    return problems


def _empty_names(recipe: Recipe) -> list[str]:
    """``data=`` with nothing behind it would be the current folder; only a system prompt may say nothing."""
    return [
        f"{path} is empty. Give it a value, or set {path}=null."
        for path, key in recipe_keys().items()
        if accepts_none(key.type_hint)
        and operator.attrgetter(path)(recipe) == ""
        and path != "data.system_prompt"
    ]


def _names_any(problem: str, unreliable: Collection[str]) -> bool:
    """Whether a group's own rule speaks of a stand-in, as a rule does about an optimizer whose name is misspelt."""
    return any(re.search(rf"\b{re.escape(key)}\b", problem) for key in unreliable if "." in key)


def model_is_named(recipe: Recipe) -> str | None:
    """There is no default model."""
    if recipe.model.name_or_path is None:
        return "model.name_or_path must name a model, got null. Set model=HUB_ID, a folder or a .gguf file."
    return None


def budget_is_readable(recipe: Recipe) -> str | None:
    """Both budgets are sizes."""
    for name in ("device", "host"):
        size = getattr(recipe.budget, name)
        try:
            if size is not None:
                parse_bytes(size)
        except UserError as error:
            return f"budget.{name}: {error}"
    return None


def fp16_needs_float32_weights(recipe: Recipe) -> str | None:
    """The loss scaler cannot unscale half-precision gradients."""
    dtype = recipe.model.dtype
    if recipe.training.mixed_precision == "fp16" and dtype in ("float16", "bfloat16"):
        return (
            f"training.mixed_precision=fp16 needs model.dtype=float32, got {dtype}. "
            "Set model.dtype=float32 or training.mixed_precision=no."
        )
    return None


def streaming_needs_max_steps(recipe: Recipe) -> str | None:
    """A stream has no length, and a schedule needs the number of steps."""
    if recipe.data.streaming and recipe.training.max_steps == -1:
        return (
            "data.streaming=true needs training.max_steps, as the length of a stream is unknown; got -1. "
            "Set training.max_steps or data.streaming=false."
        )
    return None


def evaluation_needs_data(recipe: Recipe) -> str | None:
    """An evaluation that was asked for is never skipped."""
    data, training = recipe.data, recipe.training
    has_data = any(source is not None for source in (data.eval_path, data.eval_split, data.eval_size))
    if has_data or (training.eval_steps is None and not training.eval_on_start):
        return None
    asked = "training.eval_on_start" if training.eval_steps is None else "training.eval_steps"
    return (
        f"{asked} needs held-out data, but data.eval_path, data.eval_split and data.eval_size are null. "
        f"Set one of them, such as data.eval_size=0.05, or unset {asked}."
    )


def hub_settings_need_push(recipe: Recipe) -> str | None:
    """A hub name without an upload is a forgotten switch."""
    training = recipe.training
    if training.push_to_hub or (training.hub_model_id is None and training.hub_private_repo is None):
        return None
    key = "hub_model_id" if training.hub_model_id is not None else "hub_private_repo"
    return (
        f"training.{key}={getattr(training, key)} needs training.push_to_hub=true, got false. "
        f"Set training.push_to_hub=true or training.{key}=null."
    )


def resume_needs_the_old_run(recipe: Recipe) -> str | None:
    """Replacing a run folder deletes the checkpoints in it."""
    training = recipe.training
    if training.resume_from_checkpoint == "auto" and training.overwrite_output_dir:
        return (
            "training.resume_from_checkpoint=auto continues the run that training.overwrite_output_dir=true "
            "deletes. Unset one of the two."
        )
    return None


def layer_choice_needs_checkpointing(recipe: Recipe) -> str | None:
    """A choice of layers says nothing while no layer is checkpointed."""
    config = recipe.checkpointing
    if config.mode != "none" or (config.every_n_layers == 1 and config.skip_last_layers == 0):
        return None
    key = "every_n_layers" if config.every_n_layers != 1 else "skip_last_layers"
    return (
        f"checkpointing.{key}={getattr(config, key)} needs checkpointing.mode=full, got none. "
        f"Set checkpointing.mode=full or leave checkpointing.{key} out."
    )


def constant_schedule_has_no_warmup(recipe: Recipe) -> str | None:
    """The schedule ``constant`` would ignore a warmup."""
    warmup = recipe.training.warmup_steps
    if recipe.training.lr_scheduler_type == "constant" and warmup > 0:
        return (
            f"training.lr_scheduler_type=constant has no warmup, got training.warmup_steps={warmup:g}. "
            "Set training.lr_scheduler_type=constant_with_warmup or training.warmup_steps=0."
        )
    return None


SCHEDULES_THAT_NEED_ARGUMENTS = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "warmup_stable_decay")


def schedule_takes_its_arguments(recipe: Recipe) -> str | None:
    """The schedule is built once on a stand-in, so that transformers itself judges its arguments."""
    name = recipe.training.lr_scheduler_type
    arguments: dict[str, Any] = recipe.training.lr_scheduler_kwargs or {}
    if not arguments and name not in SCHEDULES_THAT_NEED_ARGUMENTS:
        return None

    # Here, because it imports peft and bitsandbytes where they are installed: two seconds that few recipes need.
    import torch
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
    from transformers.trainer_utils import SchedulerType

    ours = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}
    known = [*inspect.signature(TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(name)]).parameters]
    known = [parameter for parameter in known if parameter not in ours]
    where = f"training.lr_scheduler_kwargs of training.lr_scheduler_type={name}"
    for unknown in arguments.keys() - known:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        return f"{where} has no `{unknown}`: {takes}.{did_you_mean(str(unknown), known)}"
    try:
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        get_scheduler(name, optimizer, 0, 1, arguments)
    except (TypeError, ValueError) as error:
        return f"{where} are refused by transformers: {error}. It takes {', '.join(known)}; got {arguments}."
    return None


@dataclass(frozen=True)
class Conflict:
    """A rule over a recipe, and the keys it reads: it returns what is wrong, or None."""

    rule: Callable[[Recipe], str | None]
    keys: tuple[str, ...]


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(model_is_named, ("model.name_or_path",)),
    Conflict(budget_is_readable, ("budget.device", "budget.host")),
    Conflict(fp16_needs_float32_weights, ("training.mixed_precision", "model.dtype")),
    Conflict(streaming_needs_max_steps, ("data.streaming", "training.max_steps")),
    Conflict(
        evaluation_needs_data,
        (
            "training.eval_steps",
            "training.eval_on_start",
            "data.eval_path",
            "data.eval_split",
            "data.eval_size",
        ),
    ),
    Conflict(
        hub_settings_need_push, ("training.push_to_hub", "training.hub_model_id", "training.hub_private_repo")
    ),
    Conflict(resume_needs_the_old_run, ("training.resume_from_checkpoint", "training.overwrite_output_dir")),
    Conflict(
        layer_choice_needs_checkpointing,
        ("checkpointing.mode", "checkpointing.every_n_layers", "checkpointing.skip_last_layers"),
    ),
    Conflict(constant_schedule_has_no_warmup, ("training.lr_scheduler_type", "training.warmup_steps")),
    Conflict(
        schedule_takes_its_arguments,
        ("training.lr_scheduler_type", "training.lr_scheduler_kwargs"),
    ),
)
