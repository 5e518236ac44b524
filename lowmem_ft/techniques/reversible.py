"""A change to a living object that can be taken back exactly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def set_attribute(target: Any, name: str, value: object) -> Callable[[], None]:
    """Sets an attribute on the instance, and returns the call that brings back the old one, or its absence.

    Args:
        target: a module or another object with a ``__dict__``.
        name: the attribute; one of the class that is hidden by this comes to light again.
        value: what it is from now on.

    Returns:
        What to hand to a :class:`lowmem_ft.handle.Handle`.
    """
    if name in vars(target):
        undo = partial(setattr, target, name, vars(target)[name])
    else:
        undo = partial(delattr, target, name)
    setattr(target, name, value)
    return undo
