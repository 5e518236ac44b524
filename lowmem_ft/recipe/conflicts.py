"""Rules across parts: what one key asks of another.

A new rule is a function in ``memory_rules.py`` or ``run_rules.py``, and a row of :data:`CONFLICTS`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from lowmem_ft.errors import RecipeError
from lowmem_ft.recipe import memory_rules, run_rules
from lowmem_ft.recipe.keys import accepts_none, recipe_groups, recipe_keys
from lowmem_ft.recipe.tree import Recipe

LARGEST_WHOLE_NUMBER = 2**32 - 1
"""Of any key: more steps, examples, tokens or layers than there are; what is larger overflows somewhere."""


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
    extreme = _extreme_numbers(recipe)
    problems = [*_empty_names(recipe), *extreme.values()]
    unreliable = {*unreliable, *extreme}
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


@dataclass(frozen=True)
class Conflict:
    """A rule over a recipe, and the keys it reads: it returns what is wrong, or None."""

    rule: Callable[[Recipe], str | None]
    keys: tuple[str, ...]


CONFLICTS: tuple[Conflict, ...] = (
    Conflict(run_rules.model_is_named, ("model.name_or_path",)),
    Conflict(run_rules.budget_is_readable, ("budget.device", "budget.host")),
    Conflict(
        memory_rules.fp16_needs_float32_weights, ("training.mixed_precision", "model.dtype", "adapter.name")
    ),
    Conflict(memory_rules.quantization_needs_an_adapter, ("model.quantization", "adapter.name")),
    Conflict(
        memory_rules.quantization_needs_safetensors,
        ("model.quantization", "model.name_or_path", "model.gguf_file"),
    ),
    Conflict(memory_rules.master_needs_bfloat16_weights, ("optimizer.master", "model.dtype", "adapter.name")),
    Conflict(
        memory_rules.in_backward_needs_finished_gradients,
        ("optimizer.in_backward", "training.gradient_accumulation_steps", "accumulation.order"),
    ),
    Conflict(
        memory_rules.loss_scaling_needs_two_phases,
        ("optimizer.in_backward", "training.mixed_precision", "training.max_grad_norm"),
    ),
    Conflict(
        memory_rules.vertical_needs_checkpointing,
        (
            "accumulation.order",
            "checkpointing.mode",
            "checkpointing.every_n_layers",
            "checkpointing.skip_last_layers",
        ),
    ),
    Conflict(memory_rules.host_state_needs_chunks, ("offload.optimizer", "optimizer.name")),
    Conflict(
        memory_rules.streamed_weights_need_their_updates,
        (
            "offload.parameters",
            "adapter.name",
            "optimizer.in_backward",
            "offload.optimizer",
            "checkpointing.mode",
            "checkpointing.every_n_layers",
            "checkpointing.skip_last_layers",
            "optimizer.name",
        ),
    ),
    Conflict(
        memory_rules.streamed_head_has_no_loss_scale,
        ("offload.parameters", "adapter.name", "training.mixed_precision"),
    ),
    Conflict(run_rules.streaming_needs_max_steps, ("data.streaming", "training.max_steps")),
    Conflict(
        run_rules.evaluation_needs_data,
        (
            "training.eval_steps",
            "training.eval_on_start",
            "data.eval_path",
            "data.eval_split",
            "data.eval_size",
        ),
    ),
    Conflict(
        run_rules.hub_settings_need_push,
        ("training.push_to_hub", "training.hub_model_id", "training.hub_private_repo"),
    ),
    Conflict(
        run_rules.resume_needs_the_old_run,
        ("training.resume_from_checkpoint", "training.overwrite_output_dir"),
    ),
    Conflict(
        memory_rules.layer_choice_needs_checkpointing,
        ("checkpointing.mode", "checkpointing.every_n_layers", "checkpointing.skip_last_layers"),
    ),
    Conflict(
        memory_rules.selective_needs_fused_attention, ("checkpointing.mode", "model.attn_implementation")
    ),
    Conflict(memory_rules.offloaded_inputs_need_checkpointing, ("offload.activations", "checkpointing.mode")),
    Conflict(memory_rules.head_tiles_need_chunked_loss, ("tiling.head", "loss.chunk_tokens")),
    Conflict(memory_rules.tiled_mlp_treats_tokens_alone, ("tiling.mlp", "model.quantization")),
    Conflict(
        run_rules.constant_schedule_has_no_warmup, ("training.lr_scheduler_type", "training.warmup_steps")
    ),
    Conflict(
        run_rules.schedule_takes_its_arguments,
        ("training.lr_scheduler_type", "training.lr_scheduler_kwargs"),
    ),
    Conflict(run_rules.warmup_ends_within_the_run, ("training.warmup_steps", "training.max_steps")),
    Conflict(run_rules.columns_differ, tuple(f"data.{name}" for name in run_rules.COLUMNS)),
    Conflict(
        memory_rules.tiles_hold_tokens,
        ("tiling.mlp", "data.max_length", "training.per_device_train_batch_size"),
    ),
)


def _empty_names(recipe: Recipe) -> list[str]:
    """``data=`` with nothing behind it would be the current folder; only a system prompt may say nothing."""
    return [
        f"{path} is empty. Give it a value, or set {path}=null."
        for path, key in recipe_keys().items()
        if accepts_none(key.type_hint)
        and operator.attrgetter(path)(recipe) == ""
        and path != "data.system_prompt"
    ]


def _extreme_numbers(recipe: Recipe) -> dict[str, str]:
    """Numbers that no rule of a key's own needs to think of, each with what is wrong, by key."""
    problems = {}
    for path in recipe_keys():
        value = operator.attrgetter(path)(recipe)
        for number in _numbers_in(value):
            if isinstance(number, float) and not math.isfinite(number):
                problems[path] = f"{path} must be finite, got {number}."
            elif isinstance(number, int) and abs(number) > LARGEST_WHOLE_NUMBER:
                problems[path] = (
                    f"{path} must be a whole number that a run can count to, at most {LARGEST_WHOLE_NUMBER}, got "
                    f"{number}."
                )
    return problems


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)):
        for entry in value:
            yield from _numbers_in(entry)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


def _names_any(problem: str, unreliable: Collection[str]) -> bool:
    """Whether a group's own rule speaks of a stand-in, as a rule does about an optimizer whose name is misspelt."""
    return any(re.search(rf"\b{re.escape(key)}\b", problem) for key in unreliable if "." in key)
