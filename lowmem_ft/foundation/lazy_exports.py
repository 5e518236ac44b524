"""Names of a package that resolve on first use, so that reading a recipe does not wait for torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, module_of: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module-level ``__getattr__`` that imports a name's module when the name is first used.

    Args:
        package: ``__name__`` of the package.
        module_of: the module, relative to the package, that defines each exported name.

    Returns:
        The function to assign to ``__getattr__``.
    """

    def __getattr__(name: str) -> Any:
        if name in module_of:
            return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
