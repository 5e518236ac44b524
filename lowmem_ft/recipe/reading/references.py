"""``${...}`` in a recipe file: the folder that contains the file, or a key of the same file, and nothing else.

A recipe file may come from another user. If its text could name an environment variable, it could copy that into the
name of a folder or a model card, so no resolver of OmegaConf is called, neither a built-in nor a registered one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.foundation.errors import did_you_mean

MOST_CHARACTERS = 1_000_000
"""Limit on all values of a file with references written out, as a few lines can double it thirty times."""

_OPENING = re.compile(r"(\\*)\$\{")
_NAME = re.compile(r"(\.*)([^\s.:{}$\[\]]+(?:\.[^\s.:{}$\[\]]+|\[\d+\])*)")
_RESOLVER = re.compile(r"\s*([\w.]+)\s*:")


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings:
    """The settings of a file with references replaced, without the values whose references cannot be resolved.

    Attributes:
        settings: nested plain values.
        problems: what is wrong with a reference, by the key that holds it.
    """

    settings: dict[str, Any]
    problems: dict[str, str]


def resolve_references(settings: Mapping[str, Any], variables: Mapping[str, str]) -> ResolvedSettings:
    r"""Replace each ``${...}``; one after a backslash (``\${``) is text.

    Args:
        settings: nested plain values, as the file has them.
        variables: other names that may occur, such as ``recipe_dir``.

    Returns:
        The settings, and what is wrong with them.

    Raises:
        TooLongError: if they would come to more than ``MOST_CHARACTERS``.
    """
    resolver = _Resolver(settings=settings, variables=variables)
    resolved = {
        key: value
        for key, inner in settings.items()
        if (value := resolver.value((key,), inner)) is not _UNKNOWN
    }
    return ResolvedSettings(settings=resolved, problems=resolver.problems)


def escape_references(value: Any) -> Any:
    """Mark each literal ``${`` in the value, so that a recipe file, and OmegaConf, read it as text."""
    if isinstance(value, dict):
        return {name: escape_references(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape_references(inner) for inner in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


class TooLongError(Exception):
    """The values of a file come to more than a recipe may hold."""


class _Unknown:
    """A placeholder for a value whose reference cannot be resolved."""


_UNKNOWN = _Unknown()
_Path = tuple[str | int, ...]


@dataclass(kw_only=True)
class _Resolver:
    settings: Mapping[str, Any]
    variables: Mapping[str, str]
    problems: dict[str, str] = field(default_factory=dict)
    under_way: list[_Path] = field(default_factory=list)
    num_characters: int = 0

    def value(self, path: _Path, value: Any) -> Any:
        """Return the value of that path with its references replaced, or ``_UNKNOWN``."""
        self._count(1, path)
        if isinstance(value, dict):
            found = {name: self.value((*path, name), inner) for name, inner in value.items()}
            return {name: inner for name, inner in found.items() if inner is not _UNKNOWN}
        if isinstance(value, list):
            items = [self.value((*path, index), inner) for index, inner in enumerate(value)]
            return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
        try:
            resolved = self._text(path, value) if isinstance(value, str) else value
        except _WrongReferenceError as error:
            self.problems.setdefault(_written(path), f"{_written(path)}: {error}")
            return _UNKNOWN
        self._count(len(resolved) if isinstance(resolved, str) else 0, path)
        return resolved

    def _count(self, num_characters: int, path: _Path) -> None:
        self.num_characters += num_characters
        if self.num_characters > MOST_CHARACTERS:
            raise TooLongError(
                f"With its references expanded, a recipe file may have {MOST_CHARACTERS:,} characters, got more at "
                f"{_written(path)}. Write fewer ${{...}}."
            )

    def _text(self, path: _Path, text: str) -> Any:
        parts = [part if isinstance(part, str) else self._named(path, part) for part in _parts(text)]
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            if part is None or isinstance(part, (dict, list)):
                raise _WrongReferenceError(
                    f"only text and numbers can be part of a text, got {part!r} in {text!r}."
                )
        return "".join(map(str, parts))

    def _named(self, path: _Path, reference: _Reference) -> Any:
        target = reference.target(path)
        if target in self.under_way or target == path[: len(target)]:
            raise _WrongReferenceError(f"{reference} refers to itself. Write the value.")
        if len(target) == 1 and target[0] in self.variables:
            return self.variables[str(target[0])]
        value: Any = self.settings
        for name in target:
            try:
                value = value[name]
            except (KeyError, IndexError, TypeError):
                raise _WrongReferenceError(
                    f"{reference} is not a key of this file.{did_you_mean(_written(target), self._names())} {_RULE} "
                    f"{_way_out(path)}"
                ) from None
        self.under_way.append(target)
        try:
            resolved = self.value(target, value)
        finally:
            self.under_way.pop()
        if resolved is _UNKNOWN:
            raise _WrongReferenceError(f"{reference} cannot be resolved.")
        return resolved

    def _names(self) -> Iterator[str]:
        yield from self.variables
        for name, inner in self.settings.items():
            yield from (f"{name}.{key}" for key in inner) if isinstance(inner, dict) else (name,)


class _WrongReferenceError(Exception):
    """A wrong reference, described in words."""


@dataclass(frozen=True)
class _Reference:
    """One ``${...}``, with the text between its braces."""

    body: str

    def __str__(self) -> str:
        return f"${{{self.body}}}"

    def target(self, path: _Path) -> _Path:
        """Return the path that it names in the value of ``path``: from the top, or, after dots, from its own group."""
        if (name := _NAME.fullmatch(self.body.strip())) is None:
            raise _WrongReferenceError(f"{self._why_not()} {_RULE} {_way_out(path)}")
        dots, names = name.groups()
        parts = tuple(int(part) if part.isdigit() else part for part in re.split(r"[.\[\]]+", names) if part)
        return (*path[: max(0, len(path) - len(dots))], *parts) if dots else parts

    def _why_not(self) -> str:
        if resolver := _RESOLVER.match(self.body):
            return f"{self} calls the resolver {resolver[1]}."
        if "${" in self.body:
            return f"{self} contains another reference."
        return f"{self} is not the name of a key."


_RULE = (
    "In a recipe file, which may come from others, ${...} can only name recipe_dir or a key of the same file."
)


def _way_out(path: _Path) -> str:
    """Return what to write in place of a reference."""
    or_set = "" if path == ("base",) else f", or set {recipe_key_of(_written(path))}=... on the command line"
    return rf"Write the value{or_set}; \${{ writes the characters themselves."


def recipe_key_of(path: str) -> str:
    """Return the key whose value a path leads into: ``data.data_files`` for ``data.data_files[1]``."""
    return ".".join(path.partition("[")[0].split(".")[:2])


def _parts(text: str) -> list[str | _Reference]:
    """Split the text at its references; a text without any is one part."""
    parts: list[str | _Reference] = []
    plain, position = "", 0
    while opening := _OPENING.search(text, position):
        backslashes = opening[1]
        plain += text[position : opening.start()] + "\\" * (len(backslashes) // 2)
        position = opening.end()
        if len(backslashes) % 2:
            plain += "${"
            continue
        parts += [plain] if plain else []
        end = _end(text, position)
        parts.append(_Reference(text[position:end]))
        plain, position = "", end + 1
    plain += text[position:]
    return [*parts, plain] if plain or not parts else parts


def _end(text: str, start: int) -> int:
    """Return the position of the brace that closes the one before ``start``."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return position
    raise _WrongReferenceError(
        rf"${{{text[start:]} is not closed. Add the }}, or write \${{ for the characters."
    )


def _written(path: _Path) -> str:
    """Return a path as written, such as ``data.data_files[1]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
