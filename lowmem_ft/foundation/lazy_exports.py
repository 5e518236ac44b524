"""Names of a package that resolve on first use, so that reading a recipe does not wait for torch."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str) -> Callable[[str], Any]:
    """Make a module-level ``__getattr__`` that imports a name's module when the name is first used.

    The package says where each name is defined as type checkers read it: by ``from ... import`` under ``if
    TYPE_CHECKING:``.

    Args:
        package: ``__name__`` of the package.

    Returns:
        The function to assign to ``__getattr__``.
    """

    def __getattr__(name: str) -> Any:
        if module := _modules_of_exports(package).get(name):
            return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__


@functools.cache
def _modules_of_exports(package: str) -> Mapping[str, str]:
    source = pkgutil.get_data(package, "__init__.py")
    blocks = [statement for statement in ast.parse(source or "").body if isinstance(statement, ast.If)]
    imports = [one for block in blocks for one in block.body if isinstance(one, ast.ImportFrom)]
    return {alias.name: one.module for one in imports for alias in one.names if one.module is not None}
