"""Rules across parts about several processes: what works with the engine that trains one model in them."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_ft.foundation.knob import Effect, Engine
from lowmem_ft.foundation.parallel_plan import plan_of
from lowmem_ft.recipe.reading.keys import RecipeKey, keys_with, memory_knobs, recipe_keys
from lowmem_ft.recipe.rules.rule import reads
from lowmem_ft.recipe.tree import Recipe


def engine_of(recipe: Recipe, num_processes: int) -> Engine | None:
    """Return the engine of a run, which one process lacks; without a strategy, each of several has a whole model."""
    return recipe.distributed.plan(num_processes).engine


def problems_with_processes(recipe: Recipe, num_processes: int) -> Iterator[str]:
    """Yield the problems of a recipe with the engine of several processes, and with a plan that is still to be made.

    Args:
        recipe: the recipe to train; without ``distributed.strategy`` each process has a whole model (ddp).
        num_processes: processes of the run.

    Yields:
        For each such setting the rule, the values seen and the way out; nothing for one process whose recipe names no
        strategy.
    """
    if num_processes > 1:
        ways_out = {
            "plan.mode=auto": "Plan first, with `lowmem-ft plan ... --write my.yaml`, and train recipe=my.yaml.",
            "checkpointing.mode=auto": "`lowmem-ft estimate` with the same settings shows its choice: set that.",
        }
        for setting in recipe.undecided_keys:
            yield f"{setting} makes a plan for one process, got {num_processes}. {ways_out[setting]}"
    if (engine := engine_of(recipe, num_processes)) is not None:
        yield from problems_with_engine(recipe, engine)


def problems_with_engine(recipe: Recipe, engine: Engine) -> Iterator[str]:
    """Yield settings that do not work with an engine: for each the rule, the values seen and the way out."""
    plan = plan_of(engine)
    for key, _, _ in memory_knobs(recipe):
        yield from problems_of_key(key, recipe, engine)
    lists = {
        "adapter.modules_to_save": recipe.adapter.modules_to_save,
        "model.add_tokens": recipe.model.add_tokens,
        "model.add_special_tokens": recipe.model.add_special_tokens,
    }
    for path, values in lists.items():
        if values and plan.shares_state:
            yield (
                f"{path}=[{', '.join(values)}] has not been shown to work where processes share a model, got "
                f"distributed.strategy={engine}. Set distributed.strategy=ddp, or leave the key out."
            )
    if plan.has_engine:
        yield from _beside_deepspeed(recipe, engine)
        yield from _generations_with_deepspeed(recipe, engine)


def problems_of_key(key: RecipeKey, recipe: Recipe, engine: Engine) -> Iterator[str]:
    """Yield what one key's value lacks to work with an engine."""
    value = key.value_in(recipe)
    effect = key.effect_of(value)
    if engine not in effect.engines:
        yield (
            f"{key.setting(value)} works in one process{_or_with(effect)}, got distributed.strategy={engine}. Set "
            f"{key.setting(key.default)}, or start one process{_or_choose(effect)}."
        )


_BESIDE_DEEPSPEED: dict[str, tuple[object, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "training.mixed_precision": ("no",),
    "optimizer.name": ("adamw",),
    "optimizer.state": ("fp32",),
    "optimizer.master": ("fp32",),
    "accumulation.dtype": ("float32",),
}
"""Values, by key, for which a run under DeepSpeed was seen to train the same as one process; others are refused."""


def _beside_deepspeed(recipe: Recipe, engine: Engine) -> Iterator[str]:
    for path, shown in _BESIDE_DEEPSPEED.items():
        key = recipe_keys()[path]
        value = key.value_in(recipe)
        works_anyway = engine in key.effect_of(value).engines  # else the line above has reported it
        if value not in shown and works_anyway:
            yield (
                f"{key.setting(value)} has not been shown to work with DeepSpeed, got distributed.strategy={engine}. "
                f"Set {key.setting(shown[0])}, or distributed.strategy=fsdp2 or ddp."
            )


def _generations_with_deepspeed(recipe: Recipe, engine: Engine) -> Iterator[str]:
    """Yield what is wrong with answers at evaluations: generation calls the model's forward, not the engine's."""
    if recipe.training.generates:
        keys = map(recipe_keys().__getitem__, ("training.eval_generations", "training.generation_prompts"))
        asked = " ".join(key.setting_in(recipe) for key in keys if key.value_in(recipe) is not None)
        yield (
            f"{asked} generates with the model's own forward, and DeepSpeed's engine holds its weights, got "
            f"distributed.strategy={engine}. Set distributed.strategy=fsdp2 or ddp, or ask the finished model with "
            "`lowmem-ft chat`."
        )


def _or_with(effect: Effect) -> str:
    return f", or with distributed.strategy={' or '.join(effect.engines)}" if effect.engines else ""


def _or_choose(effect: Effect) -> str:
    return f", or set distributed.strategy={effect.engines[-1]}" if effect.engines else ""


@reads(
    *("distributed.strategy", "adapter.modules_to_save", "model.add_tokens", "model.add_special_tokens"),
)
def settings_work_with_the_strategy(recipe: Recipe) -> Iterator[str]:
    """Each technique must work with the strategy; where the launch chooses one, this is checked again then."""
    if (engine := recipe.distributed.named_engine) is not None:
        yield from problems_with_engine(recipe, engine)


_OF_WEIGHTS_ON_THE_DEVICE = (*keys_with("state on host"), *keys_with("updates in backward"))


@reads("distributed.cpu_offload", "training.use_cpu", *_OF_WEIGHTS_ON_THE_DEVICE)
def cpu_offload_is_of_a_gpu(recipe: Recipe) -> Iterator[str]:
    """Tensors that are already on the host cannot be offloaded there, and FSDP2 copies to and from an accelerator."""
    if not recipe.distributed.cpu_offload:
        return
    if recipe.training.use_cpu and not recipe.distributed.plan().has_engine:
        yield (
            "distributed.cpu_offload=true is for weights on a GPU, got training.use_cpu=true. Set "
            "distributed.cpu_offload=false."
        )
    for key in map(recipe_keys().__getitem__, _OF_WEIGHTS_ON_THE_DEVICE):
        if key.effect_of(key.value_in(recipe)).traits:
            yield (
                f"{key.setting_in(recipe)} is for weights on the device, got distributed.cpu_offload=true, which "
                f"keeps them, gradients and state on the host. Set {key.setting(key.default)}, or leave "
                "distributed.cpu_offload out."
            )
