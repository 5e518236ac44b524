"""Replacements of upstream's names while a block runs. A missing name raises: a patch never creates one."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ClassMethodDescriptorType, ModuleType
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.tested import TESTED, install_tested, installed_version, tested_range


class UpstreamChangedError(UserError):
    """A library no longer has a name that the package relies on."""

    def __init__(self, name: str) -> None:
        library = name.partition(".")[0]
        found = f"{library} {installed_version(library)}"
        if library in TESTED:
            way_out = f"Tested is {tested_range(library)}: run pip install '{install_tested(library)}'"
        else:
            way_out = f"Install another version of {library}"
        super().__init__(
            f"lowmem_ft relies on {name}, which {found} does not have. {way_out}, or report it with this line."
        )


def existing(owner: Any, name: str) -> Any:
    """Return the attribute of a library's module, class or object.

    Raises:
        UpstreamChangedError: if it has no such name.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        raise UpstreamChangedError(f"{_full_name(owner)}.{name}") from None


def replace(undo: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Replace an attribute until a stack is undone; an inherited one is then inherited again.

    Args:
        undo: restores it.
        owner: a module or a class.
        name: name of its attribute, which must exist.
        value: the new value.

    Raises:
        UpstreamChangedError: if the owner has no such name, so that no code would read the value.
    """
    existing(owner, name)
    if name in vars(owner):
        undo.callback(setattr, owner, name, vars(owner)[name])
    else:
        undo.callback(delattr, owner, name)
    setattr(owner, name, value)


def wrap(undo: contextlib.ExitStack, owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Let calls of an attribute go to another function until a stack is undone.

    Args:
        undo: restores it.
        owner: a module or a class.
        name: name of its function or method, which must exist; a class method or static method remains one.
        around: gets the original function, then the arguments of the call. Once the stack is undone it gets none, even
            where a module imported before that has the function by a name of its own: that calls what is there then.

    Raises:
        UpstreamChangedError: if the owner has no such name.
    """
    original = existing(owner, name)
    kind = inspect.getattr_static(owner, name)
    if isinstance(kind, ClassMethodDescriptorType):  # in C, as Function.apply is since torch 2.14
        kind = classmethod(functools.partial(_of_class, kind))
    is_bound = isinstance(kind, (classmethod, staticmethod))
    if is_bound:
        original = kind.__func__

    is_undone: list[bool] = []
    undo.callback(is_undone.append, True)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_undone:
            return around(original, *args, **kwargs)
        now = getattr(owner, name) if isinstance(owner, ModuleType) else original
        return now(*args, **kwargs)

    replace(undo, owner, name, type(kind)(call) if is_bound else call)


def wrap_wherever_imported(
    undo: contextlib.ExitStack, module: ModuleType, name: str, around: Callable[..., Any]
) -> None:
    """Call :func:`wrap` for a module's function, under each name by which another module has imported it.

    Args:
        undo: restores all of them.
        module: the module that defines the function.
        name: its name there.
        around: as for :func:`wrap`.
    """
    original = existing(module, name)
    for owner in list(sys.modules.values()):
        names = [alias for alias, value in list(getattr(owner, "__dict__", {}).items()) if value is original]
        for alias in names:
            wrap(undo, owner, alias, around)


def loaded_module(name: str) -> ModuleType | None:
    """Return a module of a library if the program has imported it, else None.

    Raises:
        UpstreamChangedError: if the program has imported the library, which has no such module.
    """
    library = name.partition(".")[0]
    if name in sys.modules or library not in sys.modules:
        return sys.modules.get(name)
    try:
        is_there = importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is gone
        is_there = False
    if not is_there:
        raise UpstreamChangedError(name)
    return None


def _of_class(descriptor: ClassMethodDescriptorType, owner: type, *args: Any, **kwargs: Any) -> Any:
    return descriptor.__get__(None, owner)(*args, **kwargs)


def _full_name(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    owner_class = owner if isinstance(owner, type) else type(owner)
    return f"{owner_class.__module__}.{owner_class.__qualname__}"
