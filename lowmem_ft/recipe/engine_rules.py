"""Rules across parts about several processes: what works with the engine that has them train one model."""

from __future__ import annotations

from collections.abc import Iterator

from lowmem_ft.knob import Effect, Engine
from lowmem_ft.recipe.keys import memory_knobs, recipe_keys
from lowmem_ft.recipe.rule import reads
from lowmem_ft.recipe.tree import Recipe


def problems_with_engine(recipe: Recipe, engine: Engine) -> Iterator[str]:
    """What of a recipe does not work with an engine: for each setting the rule, the values seen and the way out."""
    for key, value, effect in memory_knobs(recipe):
        if engine not in effect.engines:
            yield (
                f"{key.setting(value)} works in one process{_or_with(effect)}, got distributed.strategy={engine}. Set "
                f"{key.setting(key.default)}, or start one process{_or_choose(effect)}."
            )


def _or_with(effect: Effect) -> str:
    return f", or with distributed.strategy={' or '.join(effect.engines)}" if effect.engines else ""


def _or_choose(effect: Effect) -> str:
    return f", or set distributed.strategy={effect.engines[-1]}" if effect.engines else ""


@reads("distributed.strategy")
def settings_work_with_the_strategy(recipe: Recipe) -> Iterator[str]:
    """A strategy that a technique cannot live with; where the launch decides on one, it is asked again then."""
    strategy = recipe.distributed.strategy
    if strategy not in (None, "none"):
        yield from problems_with_engine(recipe, strategy)


@reads("distributed.cpu_offload", "training.use_cpu", "offload.optimizer", "optimizer.in_backward")
def cpu_offload_is_of_a_gpu(recipe: Recipe) -> Iterator[str]:
    """What waits on the host already cannot be sent there, and FSDP2 copies to and from an accelerator."""
    if not recipe.distributed.cpu_offload:
        return
    if recipe.training.use_cpu:
        yield (
            "distributed.cpu_offload=true is for weights that a GPU computes with, got training.use_cpu=true. Set "
            "distributed.cpu_offload=false."
        )
    for path, on in (("offload.optimizer", "host"), ("optimizer.in_backward", True)):
        key = recipe_keys()[path]
        if key.value_in(recipe) == on:
            yield (
                f"{key.setting(on)} is for weights on the device, got distributed.cpu_offload=true, which keeps them "
                f"with gradients and state on the host. Set {key.setting(key.default)}, or leave that out."
            )
