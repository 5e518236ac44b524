"""Modules that have moved: their old names work for one version, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
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
            f"{old} is {new} now; the old name goes with the next version.", DeprecationWarning, stacklevel=2
        )
        return value

    return __getattr__
