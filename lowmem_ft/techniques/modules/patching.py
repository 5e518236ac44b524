"""Changes to a live object that can be undone exactly, in any order.

A hidden method is looked up when it is called: FSDP2 gives each module another class, and transformers checkpoints the
forward of a layer's own class alone.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

_ABSENT = object()
_HISTORY = "_lowmem_ft_overrides"
"""Attribute in which an object keeps the original values of its attributes while they are overridden."""


@dataclass(eq=False)
class _Override:
    value: Any


def set_attribute(target: Any, name: str, value: object) -> Callable[[], None]:
    """Set an attribute on the instance, and return the call that restores the old one, or its absence.

    Args:
        target: a module or another object with a ``__dict__``.
        name: the attribute; a class attribute hidden by this becomes visible again when undone.
        value: its new value.

    Returns:
        A call for a :class:`lowmem_ft.foundation.handle.Handle`.
    """
    return _put_on(target, name, _Override(value))


def wrap_method(
    target: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[], None]:
    """Set a method that calls the one it hides, and return the call that removes it again.

    Args:
        target: a module or another object with a ``__dict__``.
        name: name of the method.
        wrap: gets the hidden method and returns the new one. If the hidden method is itself removed later, the new one
            calls the method below it.

    Returns:
        A call for a :class:`lowmem_ft.foundation.handle.Handle`.
    """
    override = _Override(None)

    @functools.wraps(getattr(target, name))
    def hidden(*args: Any, **kwargs: Any) -> Any:
        overrides = _overrides(target)[name]
        value = overrides[overrides.index(override) - 1].value
        method = getattr(type(target), name).__get__(target) if value is _ABSENT else value
        return method(*args, **kwargs)

    override.value = wrap(hidden)
    return _put_on(target, name, override)


def call_around(target: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Set a method that calls a function with the one it hides, and return the call that removes it again.

    Args:
        target: a module or another object with a ``__dict__``.
        name: name of the method.
        around: gets the hidden method, then the arguments of the call.

    Returns:
        A call for a :class:`lowmem_ft.foundation.handle.Handle`.
    """

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return around(method, *args, **kwargs)

        return call

    return wrap_method(target, name, wrap)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode in a ``with`` block, for a few tokens of its own forward."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        # bitsandbytes repacks a 4-bit weight on a CPU in its first evaluation, for a kernel without a derivative:
        # training would continue with wrong gradients (0.50.2, Linear4bit.forward).
        module.training = hasattr(module, "support_avx512bf16_for_cpu")
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _put_on(target: Any, name: str, override: _Override) -> Callable[[], None]:
    if _HISTORY not in vars(target):
        setattr(target, _HISTORY, {})
    own = _Override(vars(target).get(name, _ABSENT))
    _overrides(target).setdefault(name, [own]).append(override)
    setattr(target, name, override.value)
    return functools.partial(_take_off, target, name, override)


def _take_off(target: Any, name: str, override: _Override) -> None:
    overrides = _overrides(target)[name]
    is_visible = override is overrides[-1]
    overrides.remove(override)
    if is_visible and overrides[-1].value is _ABSENT:
        delattr(target, name)
    elif is_visible:
        setattr(target, name, overrides[-1].value)
    override.value = None  # the wrapper refers to it, too: a reference cycle
    if len(overrides) == 1:
        del _overrides(target)[name]
    if not _overrides(target):
        delattr(target, _HISTORY)


def _overrides(target: Any) -> dict[str, list[_Override]]:
    """Return for each overridden attribute its original value, then the overrides, in that order."""
    return vars(target)[_HISTORY]
