"""Published modules that have moved, and names that have changed: the old ones work for one version, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module whose names have moved to another one.

    Args:
        old: the module's name.
        new: the module that has its names.

    Returns:
        A function that returns a name of ``new``, and warns about the old place with a DeprecationWarning.
    """

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(
            f"{old} is {new} now; the old name will be removed in the next version.",
            DeprecationWarning,
            stacklevel=2,
        )
        return value

    return __getattr__


def renamed(module: str, values: Mapping[str, Any]) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module some of whose names have changed.

    Args:
        module: the module's name.
        values: the values by their old names; each has its new one as ``__name__``.

    Returns:
        A function that returns the value of an old name, and warns of it with a DeprecationWarning.
    """

    def __getattr__(name: str) -> Any:
        if name not in values:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(
            f"{module}.{name} is {values[name].__name__} now; the old name will be removed in the next version.",
            DeprecationWarning,
            stacklevel=2,
        )
        return values[name]

    return __getattr__
