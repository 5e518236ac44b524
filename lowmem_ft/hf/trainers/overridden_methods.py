"""Upstream methods that are refused where a subclass of a trainer or a callback overrides them.

The loop stays the trainer's, so most overrides work by themselves. Refused are those that would make their own
optimizer or loop, and those that would change gradients that are already spent. The tests have the list of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.trainers.trainer_kinds import Kind

_OWN_OPTIMIZER = (
    "creates an optimizer, but the recipe has one. Remove the method, or train without hf.attach()"
)
_OWN_LOOP = (
    "is a part of the training loop that hf.attach() relies on. Remove the method; callbacks, compute_loss and "
    "training_step are followed"
)
_OWN_CLIPPING = (
    "replaces clipping, but the recipe computes the norm and clips. Set max_grad_norm, or change gradients in a "
    "callback's on_pre_optimizer_step"
)
_NO_GRADIENTS = (
    "may change or read gradients, which optimizer.in_backward=true has already freed. Set it to false"
)
_NO_LOGITS = (
    "is not the method of {kind}, and may need logits, which loss.chunk_tokens={chunk_tokens} never has. Set "
    "loss.chunk_tokens=null"
)


def _always(recipe: Recipe) -> bool:
    return True


def _in_backward(recipe: Recipe) -> bool:
    return recipe.optimizer.in_backward


def _chunked(recipe: Recipe) -> bool:
    return recipe.loss.chunk_tokens is not None


REFUSED: Mapping[str, tuple[Callable[[Recipe], bool], str]] = {
    "create_optimizer": (_always, _OWN_OPTIMIZER),
    "create_optimizer_and_scheduler": (_always, _OWN_OPTIMIZER),
    "get_optimizer_cls_and_kwargs": (_always, _OWN_OPTIMIZER),
    "_clip_grad_norm": (_always, _OWN_CLIPPING),
    "_inner_training_loop": (_always, _OWN_LOOP),
    "_prepare_for_training": (_always, _OWN_LOOP),
    "_run_epoch": (_always, _OWN_LOOP),
    "_wrap_model": (_always, _OWN_LOOP),
    "training_step": (_in_backward, _NO_GRADIENTS),
    "_get_grad_norm": (_in_backward, _NO_GRADIENTS),
    "compute_loss": (_chunked, _NO_LOGITS),
}
"""Methods of trainers, the condition under which an override of each is refused, and the words after its name."""

REFUSED_MOMENTS: Mapping[str, tuple[Callable[[Recipe], bool], str]] = {
    "on_pre_optimizer_step": (_in_backward, _NO_GRADIENTS)
}
"""Moments of callbacks, likewise."""

_LIBRARIES = ("transformers", "trl")


def overridden(trainer: Any, kind: Kind) -> dict[str, str]:
    """Return a trainer's methods that are not upstream's, with their owner: a subclass, or the object they were set on.

    Args:
        trainer: a trainer of ``kind``'s class, or of one derived from it.
        kind: the class upstream.
    """
    ancestors: list[type] = list(type(trainer).__mro__)
    upstream = next(one for one in ancestors if one.__name__ == kind and _library(one) in _LIBRARIES)
    names = [
        name for name in dir(upstream) if callable(getattr(upstream, name)) and not name.startswith("__")
    ]
    owners = {name: kind for name in names if _library(getattr(upstream, name)) not in _LIBRARIES}
    for one in reversed(ancestors[: ancestors.index(upstream)]):
        owners |= {name: one.__name__ for name in names if name in vars(one)}
    return owners | {name: type(trainer).__name__ for name in names if name in vars(trainer)}


def _library(one: Any) -> str:
    """Return the package that a class or a function comes from."""
    return str(getattr(one, "__module__", "")).partition(".")[0]


def problems_with_overrides(trainer: Any, recipe: Recipe, kind: Kind) -> Iterator[str]:
    """Yield a problem for each override, by a subclass or a callback, that does not work with a recipe.

    Args:
        trainer: the trainer whose class, own methods and callbacks are inspected.
        recipe: the recipe with the trainer's values.
        kind: the kind of the trainer.
    """
    for name, owner in overridden(trainer, kind).items():
        applies, why = REFUSED.get(name, (None, ""))
        if applies is not None and applies(recipe):
            words = why.format(kind=kind, chunk_tokens=recipe.loss.chunk_tokens)
            yield f"{owner}.{name} {words}."
    for callback in trainer.callback_handler.callbacks:
        yield from problems_with_callback(callback, recipe)


def problems_with_callback(callback: Any, recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each moment of a callback or its class that does not work with a recipe; upstream's do."""
    kind = callback if isinstance(callback, type) else type(callback)
    for name, (applies, why) in REFUSED_MOMENTS.items():
        owner = callback if name in vars(callback) else next(one for one in kind.__mro__ if name in vars(one))
        if _library(owner) not in _LIBRARIES and applies(recipe):
            yield f"{kind.__name__}.{name} {why}."
