"""Changes to a library's module, made when a program imports it, or at once if it already has."""

from __future__ import annotations

import contextlib
import importlib.abc
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.machinery import ModuleSpec
from typing import Any

from lowmem_ft.foundation.upstream.patches import existing, wrap

ContextFactory = Callable[[], AbstractContextManager[Any]]


def when_imported(
    undo: contextlib.ExitStack,
    name: str,
    then: Callable[[Any], None],
    within: ContextFactory = contextlib.nullcontext,
) -> None:
    """Call a function once a module is imported: now, or right after the program imports it, before it is used.

    Args:
        undo: removes the hook.
        name: name of the module, such as ``transformers.trainer``.
        then: the function, which receives the module; modules that import it may not be complete yet.
        within: a context around the module's import.
    """
    if name in sys.modules:
        then(sys.modules[name])
        return
    _set_hook(undo, _ImportHook(lambda imported: imported == name, then, within))


def when_any_imported(
    undo: contextlib.ExitStack,
    packages: tuple[str, ...],
    then: Callable[[Any], None],
    within: ContextFactory = contextlib.nullcontext,
) -> None:
    """Call a function once for each module of some packages, as :func:`when_imported` does for one.

    Args:
        undo: removes the hook.
        packages: their full names; modules within them count, too.
        then: the function, which receives the module.
        within: a context around the import of each.
    """

    def is_of_packages(name: str) -> bool:
        return any(name == package or name.startswith(f"{package}.") for package in packages)

    for name, module in list(sys.modules.items()):
        if is_of_packages(name) and module is not None:
            then(module)
    _set_hook(undo, _ImportHook(is_of_packages, then, within))


def _set_hook(undo: contextlib.ExitStack, hook: _ImportHook) -> None:
    sys.meta_path.insert(0, hook)
    undo.callback(sys.meta_path.remove, hook)


def wrap_when_imported(
    undo: contextlib.ExitStack, module: str, owner: str, name: str, around: Callable[..., Any]
) -> None:
    """Call :func:`lowmem_ft.foundation.upstream.patches.wrap` once a module is imported.

    Args:
        undo: restores the attribute, and removes the hook.
        module: name of the module, such as ``transformers.trainer``.
        owner: name of a class or a module in it; empty: the attribute is its own.
        name: name of the attribute.
        around: gets the original function, then the arguments of the call.
    """

    def then(loaded: Any) -> None:
        wrap(undo, existing(loaded, owner) if owner else loaded, name, around)

    when_imported(undo, module, then)


class _ImportHook(importlib.abc.MetaPathFinder):
    """Lets the other finders find the module, and runs the function after the module's code."""

    def __init__(
        self, is_meant: Callable[[str], bool], then: Callable[[Any], None], within: ContextFactory
    ) -> None:
        self._is_meant = is_meant
        self._then = then
        self._within = within

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if not self._is_meant(fullname):
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]  # another hook may be set for the same module
        found = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._extend(spec.loader)
        return spec

    def _extend(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            with self._within():
                execute(module)
            self._then(module)

        loader.exec_module = exec_module
