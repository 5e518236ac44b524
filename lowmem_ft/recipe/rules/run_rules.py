"""Rules across parts about a run: its data, evaluation, schedule, folder and upload. See ``conflicts.py``."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.units import parse_bytes
from lowmem_ft.recipe.reading.keys import keys_whose_effect, recipe_groups, recipe_keys, unknown_key
from lowmem_ft.recipe.rules.rule import reads
from lowmem_ft.recipe.rules.schedules import schedule_problems
from lowmem_ft.recipe.training_config import TrainingConfig
from lowmem_ft.recipe.tree import Recipe

MOST_TOKENS, MOST_MICRO_BATCHES = 2**21, 2**12
"""The most tokens of a micro-batch, and micro-batches of a step: more is a typing error, and an estimate really makes
the batches.
"""


@reads("model.name_or_path")
def model_is_named(recipe: Recipe) -> Iterator[str]:
    """There is no default model."""
    if recipe.model.name_or_path is None:
        yield "model.name_or_path must name a model, got null. Set model=HUB_ID, a folder or a .gguf file."


@reads("name", "training.output_dir")
def name_is_that_of_a_folder(recipe: Recipe) -> Iterator[str]:
    """A run writes to ``runs/NAME`` unless ``training.output_dir`` is set: ``..`` would be the current folder."""
    is_folder = recipe.name.isprintable() and not {"", ".", ".."} & set(recipe.name.split("/"))
    if recipe.training.output_dir is None and not is_folder:
        yield (
            f"name becomes the name of a folder in runs/, got {recipe.name!r}. Write a word, or set "
            "training.output_dir."
        )


@reads("budget.device", "budget.host")
def budget_is_readable(recipe: Recipe) -> Iterator[str]:
    """Both budgets must be sizes."""
    for name in ("device", "host"):
        size = getattr(recipe.budget, name)
        try:
            if size is not None:
                parse_bytes(size)
        except UserError as error:
            yield f"budget.{name}: {error}"


@reads("plan.keep")
def kept_keys_exist(recipe: Recipe) -> Iterator[str]:
    """If a name is misspelt, the planner would silently choose the key that it was to keep."""
    for path in recipe.plan.keep:
        if path not in recipe_keys() and path not in recipe_groups():
            yield f"plan.keep: {unknown_key(path)}"


@reads("plan.allow", "plan.keep")
def what_is_given_up_is_not_kept(recipe: Recipe) -> Iterator[str]:
    """A plan cannot give up what it must not change: the consent would be skipped in silence."""
    for path in keys_whose_effect(lambda effect: effect.consent):
        kept = [name for name in recipe.plan.keep if name in (path, path.partition(".")[0])]
        words = {effect.consent for effect in recipe_keys()[path].possible_effects}
        for word in recipe.plan.allow:
            if kept and word in words:
                yield (
                    f"plan.allow={word} lets a plan change {path}, and plan.keep={kept[0]} forbids it. Leave {word} "
                    f"out of plan.allow, or {kept[0]} out of plan.keep."
                )


@reads("data.streaming", "training.max_steps")
def streaming_needs_max_steps(recipe: Recipe) -> Iterator[str]:
    """A stream has no length, and a schedule needs the number of steps."""
    if recipe.data.streaming and recipe.training.max_steps == -1:
        yield (
            "data.streaming=true needs training.max_steps, because the length of a stream is unknown; got -1. Set "
            "training.max_steps or data.streaming=false."
        )


@reads(
    "training.eval_steps",
    "training.eval_on_start",
    "training.eval_generations",
    "training.generation_prompts",
    "data.eval_path",
    "data.eval_split",
    "data.eval_size",
)
def evaluation_needs_data(recipe: Recipe) -> Iterator[str]:
    """A requested evaluation is never skipped; prompts of a file are data, too, except for a loss on start."""
    data, training = recipe.data, recipe.training
    if data.has_held_out:
        return
    has_prompts = training.generation_prompts is not None
    asked = {
        "training.eval_steps": training.eval_steps is not None and not has_prompts,
        "training.eval_on_start": training.eval_on_start,
        "training.eval_generations": training.eval_generations is not None and not has_prompts,
    }
    if (first := next((key for key, is_asked in asked.items() if is_asked), None)) is not None:
        prompts = ", or training.generation_prompts=FILE" if first == "training.eval_generations" else ""
        yield (
            f"{first} needs held-out data, but data.eval_path, data.eval_split and data.eval_size are null. "
            f"Set one of them, such as data.eval_size=0.05{prompts}, or unset {first}."
        )


@reads("training.eval_generations", "training.generation_prompts", "training.max_new_tokens")
def length_of_answers_needs_prompts(recipe: Recipe) -> Iterator[str]:
    """A length without answers is a forgotten switch."""
    training = recipe.training
    if not training.generates and training.max_new_tokens != TrainingConfig().max_new_tokens:
        yield (
            f"training.max_new_tokens={training.max_new_tokens} limits answers at evaluations, but the recipe requests "
            "none. Set training.eval_generations, or leave training.max_new_tokens out."
        )


@reads(
    "training.load_best_model_at_end",
    "training.early_stopping_patience",
    "training.eval_steps",
)
def best_model_needs_evaluations(recipe: Recipe) -> Iterator[str]:
    """With one evaluation, at the end, there is nothing to choose; that it needs held-out data is the rule above."""
    training = recipe.training
    asked = [
        key.setting(key.value_in(recipe))
        for name in ("load_best_model_at_end", "early_stopping_patience")
        if (key := recipe_keys()[f"training.{name}"]).value_in(recipe)
    ]
    if asked and training.eval_steps is None:
        yield (
            f"{asked[0]} compares evaluations during the run, but training.eval_steps is null. Set "
            f"training.eval_steps, such as 100, or unset {asked[0].partition('=')[0]}."
        )


@reads(
    "training.load_best_model_at_end",
    "training.early_stopping_patience",
    "training.metric_for_best_model",
    "training.greater_is_better",
)
def metric_of_best_model_is_used(recipe: Recipe) -> Iterator[str]:
    """A metric that nothing compares is a forgotten switch."""
    training = recipe.training
    if training.load_best_model_at_end or training.early_stopping_patience is not None:
        return
    for name in ("metric_for_best_model", "greater_is_better"):
        key = recipe_keys()[f"training.{name}"]
        if (value := key.value_in(recipe)) is not None:
            yield (
                f"{key.setting(value)} needs training.load_best_model_at_end=true or training.early_stopping_patience, "
                f"got false and null. Set one of them, or training.{name}=null."
            )


@reads("training.profile_steps", "training.max_steps")
def profiled_steps_are_within_the_run(recipe: Recipe) -> Iterator[str]:
    """Profiled steps are steps of the run; if the data decides their number, training checks it once that is read."""
    if recipe.training.max_steps >= 1:
        yield from recipe.training.profiled_after(recipe.training.max_steps)


@reads("training.early_stopping_patience", "training.early_stopping_threshold")
def threshold_needs_patience(recipe: Recipe) -> Iterator[str]:
    """A threshold alone stops nothing."""
    training = recipe.training
    if training.early_stopping_threshold and training.early_stopping_patience is None:
        yield (
            f"training.early_stopping_threshold={training.early_stopping_threshold:g} needs "
            "training.early_stopping_patience, got null. Set it, such as 3, or training.early_stopping_threshold=0."
        )


@reads("training.push_to_hub", "training.hub_model_id", "training.hub_private_repo")
def hub_settings_need_push(recipe: Recipe) -> Iterator[str]:
    """A hub name without an upload is a forgotten switch."""
    training = recipe.training
    asked = [key for key in ("hub_model_id", "hub_private_repo") if getattr(training, key) is not None]
    if asked and not training.push_to_hub:
        yield (
            f"training.{asked[0]}={getattr(training, asked[0])} needs training.push_to_hub=true, got false. "
            f"Set training.push_to_hub=true or training.{asked[0]}=null."
        )


@reads(
    "training.per_device_train_batch_size",
    "training.per_device_eval_batch_size",
    "training.gradient_accumulation_steps",
    "data.max_length",
    "data.packing",
)
def steps_have_a_size(recipe: Recipe) -> Iterator[str]:
    """Rows that are not packed may be short, however long they might be; an estimate checks again with the longest."""
    length = recipe.data.max_length if recipe.data.packing else None
    return oversized_steps(recipe, max(1, length or 1))


def oversized_steps(recipe: Recipe, row_tokens: int) -> Iterator[str]:
    """Yield what makes a micro-batch or a step too large with rows of so many tokens."""
    training, most_rows = recipe.training, max(1, MOST_TOKENS // row_tokens)
    row = "at least one" if row_tokens == 1 else f"up to {row_tokens:,}"
    tokens = f"a micro-batch has at most {MOST_TOKENS:,} tokens, and a row has {row}"
    passes = "a step passes through the model once for each micro-batch"
    for key, most, why in (
        ("per_device_train_batch_size", most_rows, tokens),
        ("per_device_eval_batch_size", most_rows, tokens),
        ("gradient_accumulation_steps", MOST_MICRO_BATCHES, passes),
    ):
        value = getattr(training, key)
        if value is not None and value > most:
            yield f"training.{key} must be at most {most}, got {value}: {why}. Set training.{key}={most} or less."


@reads("training.resume_from_checkpoint", "training.overwrite_output_dir")
def resume_needs_the_old_run(recipe: Recipe) -> Iterator[str]:
    """Replacing a run folder deletes the checkpoints in it."""
    training = recipe.training
    if training.resume_from_checkpoint == "auto" and training.overwrite_output_dir:
        yield (
            "training.resume_from_checkpoint=auto continues the run that training.overwrite_output_dir=true deletes. "
            "Unset one of them."
        )


@reads("training.lr_scheduler_type", "training.warmup_steps")
def constant_schedule_has_no_warmup(recipe: Recipe) -> Iterator[str]:
    """The schedule ``constant`` would ignore a warmup."""
    warmup = recipe.training.warmup_steps
    if recipe.training.lr_scheduler_type == "constant" and warmup > 0:
        yield (
            f"training.lr_scheduler_type=constant has no warmup, got training.warmup_steps={warmup:g}. "
            "Set training.lr_scheduler_type=constant_with_warmup or training.warmup_steps=0."
        )


@reads("training.warmup_steps", "training.max_steps")
def warmup_ends_within_the_run(recipe: Recipe) -> Iterator[str]:
    """Warm-up ends within the run; if the data decides the number of steps, training checks it once that is read."""
    training = recipe.training
    if 1 <= training.max_steps < training.warmup_steps:  # below 1: -1, or refused elsewhere
        yield (
            f"training.warmup_steps={training.warmup_steps:.0f} is more than training.max_steps={training.max_steps}: "
            "the learning rate would never reach training.learning_rate. Lower it, or give a share of all steps, such "
            "as 0.03."
        )


COLUMNS = ("messages_column", "prompt_column", "input_column", "completion_column", "text_column")


@reads(*(f"data.{name}" for name in COLUMNS))
def columns_differ(recipe: Recipe) -> Iterator[str]:
    """A prompt that is its own completion is a mistake; columns that are left out follow from the format."""
    named = {key: getattr(recipe.data, key) for key in COLUMNS if getattr(recipe.data, key) is not None}
    twice = [key for key in named if list(named.values()).count(named[key]) > 1]
    if twice:
        yield (
            f"{' and '.join(f'data.{key}' for key in twice)} must be different columns, got {named[twice[0]]} for "
            "each. Name the column that holds each part."
        )


@reads("training.lr_scheduler_type", "training.lr_scheduler_kwargs", "training.learning_rate")
def schedule_takes_its_arguments(recipe: Recipe) -> Iterator[str]:
    """A misspelt argument, or one out of range, would cause an error in transformers once the model is loaded."""
    training = recipe.training
    return schedule_problems(
        training.lr_scheduler_type, training.lr_scheduler_kwargs or {}, training.learning_rate
    )
