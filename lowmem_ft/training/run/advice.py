"""Advice on what to change first, from a profile: recipe keys, and parts of the model that are slow."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torch import nn

from lowmem_ft.monitoring.profiling.step_profile import (
    DATA,
    FETCH,
    RECOMPUTATION,
    UPDATE,
    ProfileRow,
    StepProfile,
)
from lowmem_ft.recipe import Recipe

LARGE_DATA, LARGE_RECOMPUTATION, LARGE_UPDATE, LARGE_WAIT = 0.05, 0.1, 0.25, 0.03
LARGE_UNFUSED, LARGE_MODULE = 0.05, 0.05
"""Shares of a step from which a part is worth a sentence."""
MOST_SENTENCES = 5
"""Most sentences of advice; the tables have the rest."""
BUSY_DEVICE = 0.8
"""Share of a step for which a device computes if the host is fast enough."""
TIMES_THE_CLOCK, SHARE_OF_OPERATOR = 2.0, 0.05
"""An operator takes longer than predicted if it takes this many times the clock's seconds, and this share of a step."""

_LIBRARIES = frozenset(
    {"torch", "transformers", "peft", "accelerate", "bitsandbytes", "liger_kernel", "lowmem_ft"}
)
_FUSED_BY_KERNELS = ("Norm", "Rotary", "MLP", "Activation")
_PRODUCTS = ("mm", "linear", "attention", "embedding")


class Finding(NamedTuple):
    """One measured fact, with the recipe key or the module to change.

    Attributes:
        seconds: seconds of a step that it is about.
        sentence: the fact and the way out.
    """

    seconds: float
    sentence: str


def advice_of(profile: StepProfile, recipe: Recipe, model: nn.Module) -> tuple[str, ...]:
    """Return what to change first, the largest part of the step first.

    Args:
        profile: the measured steps.
        recipe: the recipe of the run.
        model: the model that was profiled.

    Returns:
        A sentence each, at most ``MOST_SENTENCES``; one that says so if nothing is large.
    """
    found = [
        *_slow_modules(profile, model),
        *_own_modules(profile, model),
        *_parts(profile, recipe),
        *_device(profile, recipe),
        *_beyond_the_clock(profile),
    ]
    ordered = sorted(found, key=lambda one: one.seconds, reverse=True)
    return tuple(one.sentence for one in ordered[:MOST_SENTENCES]) or (
        "Nothing is out of proportion: matrix products decide.",
    )


def _slow_modules(profile: StepProfile, model: nn.Module) -> Iterator[Finding]:
    for one in profile.slow:
        hooks = _own_hooks(model.get_submodule(one.module))
        with_hooks = f", and has hooks: {', '.join(hooks)}" if hooks else ""
        more = "" if not one.others_seconds else f" {one.seconds / one.others_seconds:.3g} times as long as"
        yield Finding(
            one.seconds,
            f"{profile.label(one.module)} takes {_milliseconds(one.seconds)} a step,{more or ' more than'} those like "
            f"it{with_hooks}.",
        )


def _own_modules(profile: StepProfile, model: nn.Module) -> Iterator[Finding]:
    """Yield what belongs to no library that the run uses, and takes long."""
    slow = {one.module for one in profile.slow}
    kinds = {
        type(module).__name__: inspect.getmodule(type(module))
        for module in model.modules()
        if not _is_known(type(module))
    }
    for name, kind in profile.classes.items():
        rows = [row for row in profile.rows if row.module == name]
        if name in slow or profile.share(rows) < LARGE_MODULE or kind not in kinds:
            continue
        yield Finding(
            profile.total(rows),
            f"{profile.label(name)} takes {profile.share(rows):.0%} of the step. It is code of "
            f"{_file_of(kinds[kind])}, not of torch or transformers: look there first.",
        )


def _parts(profile: StepProfile, recipe: Recipe) -> Iterator[Finding]:
    def of(part: str) -> tuple[float, float]:
        seconds = math.fsum(row.host_seconds for row in profile.rows if row.part == part)
        if profile.is_on_device and part != DATA:
            seconds = profile.total(row for row in profile.rows if row.part == part)
        return seconds, seconds / (profile.step_seconds or 1.0)

    seconds, share = of(DATA)
    if share >= LARGE_DATA:
        way = "data.packing=true makes fewer, longer rows"
        if recipe.data.streaming:
            way = "data.streaming=false tokenizes once, before the first step"
        elif recipe.data.packing:
            way = "training.per_device_train_batch_size decides how many rows are collated"
        yield Finding(seconds, f"The data of a step takes {share:.0%} of it, before any kernel runs: {way}.")
    seconds, share = of(RECOMPUTATION)
    if share >= LARGE_RECOMPUTATION:
        yield Finding(
            seconds,
            f"Checkpointed layers compute {share:.0%} of the step a second time. Where memory allows, checkpoint fewer "
            "(checkpointing.every_n_layers, checkpointing.skip_last_layers) or none (checkpointing.mode=none); "
            "checkpointing.mode=auto finds the fastest that fits.",
        )
    seconds, share = of(UPDATE)
    if share >= LARGE_UPDATE:
        yield Finding(
            seconds,
            f"The update of the weights takes {share:.0%} of the step, whatever its number of tokens: more of them a "
            "step (training.gradient_accumulation_steps, training.per_device_train_batch_size) divide it.",
        )


def _device(profile: StepProfile, recipe: Recipe) -> Iterator[Finding]:
    """Yield what only a GPU has: times in which it has nothing to do, and kernels that could be fewer."""
    if not profile.is_on_device:
        return
    for row in profile.rows:
        share = row.wait_seconds / (profile.step_seconds or 1.0)
        if share >= LARGE_WAIT and row.part != FETCH:
            yield Finding(
                row.wait_seconds,
                f"The host waits {share:.0%} of the step for the device, in {row.operator} of "
                f"{profile.label(row.module)}: read values of tensors once a step, or not at all.",
            )
    idle = profile.step_seconds - profile.busy_seconds
    if idle > (1 - BUSY_DEVICE) * profile.step_seconds:
        yield Finding(
            idle,
            f"The device has nothing to do for {idle / profile.step_seconds:.0%} of the step, while the host "
            "prepares its work: larger micro-batches (training.per_device_train_batch_size) take fewer kernels for "
            "as many tokens.",
        )
    unfused = [row for row in profile.rows if _could_be_fused(profile, row)]
    if recipe.model.kernels == "none" and profile.share(unfused) >= LARGE_UNFUSED:
        yield Finding(
            profile.total(unfused),
            f"Norms, rotary embeddings and activations take {profile.share(unfused):.0%} of the device's time in small "
            "kernels: model.kernels=auto makes one of each.",
        )


def _could_be_fused(profile: StepProfile, row: ProfileRow) -> bool:
    kind = profile.classes.get(row.module, "")
    is_product = any(word in row.operator for word in _PRODUCTS)
    return any(word in kind for word in _FUSED_BY_KERNELS) and not is_product


def _beyond_the_clock(profile: StepProfile) -> Iterator[Finding]:
    for operator, predicted in profile.predicted.items():
        rows = [row for row in profile.rows if row.operator == operator]
        measured = profile.total(rows)
        if measured >= TIMES_THE_CLOCK * predicted and profile.share(rows) >= SHARE_OF_OPERATOR:
            yield Finding(
                measured - predicted,
                f"{operator} takes {measured / (predicted or math.inf):.3g} times what the clock of the estimate says: "
                "other shapes than the recipe's worst batch, another kernel, or a GPU that others use, too.",
            )


def _own_hooks(module: nn.Module) -> list[str]:
    """Return the forward hooks of a module that belong to no library, by name and file."""
    hooks: Iterable[Callable[..., object]] = [
        *module._forward_pre_hooks.values(),
        *module._forward_hooks.values(),
    ]
    return [
        f"{getattr(hook, '__qualname__', type(hook).__name__)} of {_file_of(inspect.getmodule(hook))}"
        for hook in hooks
        if not _is_known(hook)
    ]


def _is_known(thing: object) -> bool:
    return str(getattr(thing, "__module__", "torch")).partition(".")[0] in _LIBRARIES


def _file_of(module: object) -> str:
    path = str(getattr(module, "__file__", None) or getattr(module, "__name__", "an unknown file"))
    return path.rpartition("/")[2]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"
