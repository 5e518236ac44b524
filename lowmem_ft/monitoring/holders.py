"""The holder of an object: the path to it from a variable that has a name."""

from __future__ import annotations

import contextlib
import gc
import inspect
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_OURS = str(Path(__file__).parent)
_MOST_LEVELS = 20
_MOST_OBJECTS = 20_000
_CLOSURE, _DICTIONARY, _QUOTES = "(closure)", "(dictionary)", "'"
_REFERENCES_BY_US = 3
"""References to a frame's variables: the frame's, ours and a call's. More mean that the program called ``locals()``."""
_CONTAINERS = (dict, list, tuple, set, frozenset, types.CellType)


class _Link:
    """One step of the path: an object, its place in ``owner``, and the link to the object that it leads to."""

    __slots__ = ("inner", "label", "thing")

    def __init__(self, thing: Any, label: str, inner: _Link | None) -> None:
        self.thing = thing
        self.label = label
        self.inner = inner


def holder_of(*things: Any) -> str:
    """Return the shortest path from a variable to one of the objects: ``x.history[0], local variable of f (a.py:7)``.

    Variables are locals of running functions, in any thread, globals, attributes of classes, and variables of
    closures. The object itself is not changed, but objects with inline attributes get a dictionary.

    Args:
        things: any objects.

    Returns:
        The path in words; empty if no variable leads there.
    """
    running = _running_variables()
    return _search([_Link(thing, "", None) for thing in things], lambda link: _named(link, running))


def holder_in_garbage(thing: Any, garbage: Iterable[Any]) -> str:
    """Return the nearest instance of a class, among objects that only hold each other, on the path to one of them.

    Args:
        thing: one of the garbage.
        garbage: objects that the collector found unreachable.
    """
    within = {id(one) for one in garbage}

    def named(link: _Link) -> str:
        if link.inner is None or isinstance(link.thing, _CONTAINERS):
            return ""
        return f"{_type_name(link.thing)}{_way(link)}"

    return _search([_Link(thing, "", None)], named, within)


def _search(frontier: list[_Link], name_of: Any, within: set[int] | None = None) -> str:
    """Search outwards, level by level, with one walk over all objects of the process for each level."""
    seen = {id(link.thing) for link in frontier}
    for _ in range(_MOST_LEVELS):
        for link in frontier:
            name = name_of(link)
            if name:
                return name
        inner_of = {id(link.thing): link for link in frontier}
        found = gc.get_referrers(*(link.thing for link in frontier))
        frontier = []
        for owner in found:
            if id(owner) in seen or _is_ours(owner) or (within is not None and id(owner) not in within):
                continue
            for link in _links(owner, inner_of):
                frontier.append(link)
                seen.add(id(owner))
                break
        del found
        if not frontier or len(seen) > _MOST_OBJECTS:
            break
    return ""


def _is_ours(thing: Any) -> bool:
    if isinstance(thing, types.FrameType):
        return thing.f_code.co_filename.startswith(_OURS)
    return type(thing) is _Link


def _links(owner: Any, inner_of: dict[int, _Link]) -> Iterator[_Link]:
    """Yield links from an object to those of the searched objects that it holds."""
    for label, held in _held_by(owner):
        inner = inner_of.get(id(held))
        if inner is not None:
            yield _Link(owner, label, inner)


def _held_by(owner: Any) -> Iterator[tuple[str, Any]]:
    kind = type(owner)
    if issubclass(kind, dict):
        yield from ((f"[{key!r}]", value) for key, value in list(owner.items()))
        yield from (("(a key)", key) for key in list(owner))
    elif issubclass(kind, (list, tuple)) or kind.__name__ == "deque":
        yield from ((f"[{index}]", value) for index, value in enumerate(list(owner)))
    elif issubclass(kind, (set, frozenset)):
        yield from (("(one of a set)", value) for value in list(owner))
    elif kind is types.CellType:
        yield "", owner.cell_contents
    elif kind is types.FunctionType:
        yield _CLOSURE, owner.__closure__
        yield ".__defaults__", owner.__defaults__
        yield ".__kwdefaults__", owner.__kwdefaults__
    elif kind is types.FrameType:
        yield from ((f" `{name}`", value) for name, value in _variables_of(owner))
    elif kind is types.GeneratorType and owner.gi_frame is not None:
        yield from ((f" `{name}`", value) for name, value in _variables_of(owner.gi_frame))
        yield "", owner.gi_frame  # which alone holds the variables before Python 3.11
    elif kind is types.MethodType:
        yield ".__self__", owner.__self__
    yield from _attributes(owner)


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield existing attributes, without running a program's own code."""
    try:
        own: Any = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        own = {}
    if isinstance(owner, type):
        yield _DICTIONARY, _dictionary_of_class(owner)
    yield _DICTIONARY, own
    yield from ((f".{name}", value) for name, value in list(own.items()))
    for name in {slot for base in inspect.getmro(type(owner)) for slot in _slots(base)}:
        value = inspect.getattr_static(type(owner), name, None)
        if isinstance(value, types.MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # never set
                yield f".{name}", value.__get__(owner)
    yield from ((f" (within a {_type_name(owner)})", value) for value in _referents(owner))


def _slots(base: type) -> tuple[str, ...]:
    slots: Any = base.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _dictionary_of_class(owner: type) -> Any:
    return next((one for one in gc.get_referents(owner) if isinstance(one, dict)), None)


def _referents(owner: Any) -> list[Any]:
    return [] if isinstance(owner, types.ModuleType) else gc.get_referents(owner)


def _named(link: _Link, running: dict[int, tuple[str, str]]) -> str:
    """Return the path if its outer end is a variable, else an empty string."""
    thing = link.thing
    if id(thing) in running:
        name, place = running[id(thing)]
        return f"{name}{_way(link)}, {place}"
    if link.inner is None:
        return ""
    if isinstance(thing, types.ModuleType):
        return f"{thing.__name__}{_way(link)}"
    if isinstance(thing, type):
        return f"{thing.__module__}.{thing.__qualname__}{_way(link)}, an attribute of the class"
    if isinstance(thing, types.FunctionType):
        return f"{thing.__qualname__}{_way(link)} ({_file(thing.__code__)}:{thing.__code__.co_firstlineno})"
    if isinstance(thing, types.FrameType):
        if _is_of_a_generator(thing):
            return ""
        return (
            f"local variable{_way(link)} of {_place(thing.f_code)}, whose frame is kept, as a traceback does"
        )
    if isinstance(thing, types.GeneratorType):
        return f"local variable{_way(link)} of the generator {_place(thing.gi_code)}"
    return ""


def _is_of_a_generator(frame: types.FrameType) -> bool:
    """Return whether a frame is kept by its generator, so that it can run on."""
    return bool(frame.f_code.co_flags & inspect.CO_GENERATOR) and any(
        type(owner) is types.GeneratorType and owner.gi_frame is frame for owner in gc.get_referrers(frame)
    )


def _way(link: _Link) -> str:
    """Return the path from an object inwards, written as in code."""
    way = ""
    current = link
    while current.inner is not None:
        label, inner = current.label, current.inner
        if label == _DICTIONARY and inner.inner is not None:
            label = f".{inner.label.strip('[]').strip(_QUOTES)}"
            inner = inner.inner
        elif label == _CLOSURE and inner.inner is not None:
            label = f" (its closure's `{current.thing.__code__.co_freevars[int(inner.label.strip('[]'))]}`)"
            inner = inner.inner
        way += label
        current = inner
    return way


def _running_variables() -> dict[int, tuple[str, str]]:
    """Return the variables of all running code except ours: name and place of each, by the value's identity."""
    found: dict[int, tuple[str, str]] = {}
    innermost = [sys._getframe(1), *sys._current_frames().values()]
    while innermost:
        # No variable may be left with this function's own frame, which would keep itself and its surroundings alive.
        current: types.FrameType | None = innermost.pop(0)
        while current is not None:
            if not _is_ours(current):
                _add_variables(current, found)
            current = current.f_back
    return found


def _add_variables(frame: types.FrameType, found: dict[int, tuple[str, str]]) -> None:
    is_function = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED)
    place = f"local variable of {_place(frame.f_code)}" if is_function else f"global of {_file(frame.f_code)}"
    for name, value in _variables_of(frame):
        found.setdefault(id(value), (name, place))


def _variables_of(frame: types.FrameType) -> list[tuple[str, Any]]:
    """Return names and values; a function's values are not kept alive by this query."""
    variables = frame.f_locals
    named = list(variables.items())
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and sys.version_info < (3, 13)
    if is_copy and sys.getrefcount(variables) == _REFERENCES_BY_US:
        variables.clear()  # the frame keeps this copy, and with it values that the function has let go of
    return named


def _place(code: types.CodeType) -> str:
    return f"{code.co_name} ({_file(code)}:{code.co_firstlineno})"


def _file(code: types.CodeType) -> str:
    return Path(code.co_filename).name


def _type_name(thing: Any) -> str:
    return type(thing).__qualname__
