"""``${...}`` in a recipe file: the folder that contains the file, or a key of the same file, and nothing else.

A recipe file may come from another user. If its text could name an environment variable, it could copy that into the
name of a folder or a model card, so no resolver of OmegaConf is called, neither a built-in nor a registered one. The
value of a key that is named holds no reference but ``${recipe_dir}``, so that nothing refers to itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.foundation.errors import did_you_mean

MOST_CHARACTERS = 1_000_000
"""Limit on the values that references are replaced by in a file, as many of them may name one long value."""

_REFERENCE = re.compile(r"(?<!\\)(?P<pairs>(?:\\\\)*)(?:(?P<escape>\\)\$\{|\$\{(?P<body>[^{}]*)(?P<end>\}?))")
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


def resolve_references(settings: Mapping[str, Any], recipe_dir: str) -> ResolvedSettings:
    r"""Replace each ``${...}``; one after a backslash (``\${``) is text.

    Args:
        settings: nested plain values, as the file has them.
        recipe_dir: the folder that contains the file.

    Returns:
        The settings, and what is wrong with them.

    Raises:
        TooLongError: if the resolved references are longer than ``MOST_CHARACTERS``.
    """
    resolver = _Resolver(settings=settings, recipe_dir=recipe_dir)
    return ResolvedSettings(settings=resolver.value((), dict(settings)), problems=resolver.problems)


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
    """The resolved ``${...}`` references of a recipe are longer than ``MOST_CHARACTERS``."""


class _Unknown:
    """A placeholder for a value whose reference cannot be resolved."""


_UNKNOWN = _Unknown()
_Path = tuple[str | int, ...]


@dataclass(kw_only=True)
class _Resolver:
    settings: Mapping[str, Any]
    recipe_dir: str
    problems: dict[str, str] = field(default_factory=dict)
    num_characters: int = 0

    def value(self, path: _Path, value: Any) -> Any:
        """Return the value of that path with its references replaced, or ``_UNKNOWN``."""
        if isinstance(value, dict):
            found = {name: self.value((*path, name), inner) for name, inner in value.items()}
            return {name: inner for name, inner in found.items() if inner is not _UNKNOWN}
        if isinstance(value, list):
            items = [self.value((*path, index), inner) for index, inner in enumerate(value)]
            return _UNKNOWN if any(item is _UNKNOWN for item in items) else items
        if not isinstance(value, str):
            return value
        try:
            return _replaced(value, self._named)
        except _WrongReferenceError as error:
            written = _written(path)
            self.problems[written] = f"{written}: {error} {_RULE} {_way_out(path)}"
            return _UNKNOWN

    def _named(self, name: str) -> Any:
        """Return the value that a reference names."""
        if name == "recipe_dir":
            return self.recipe_dir
        value: Any = self.settings
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                raise _WrongReferenceError(
                    f"${{{name}}} is not a key of this file.{did_you_mean(name, self._names())}"
                )
            value = value[part]
        if value is None or isinstance(value, (dict, list)):
            raise _WrongReferenceError(
                f"${{{name}}} must name a text, a number or a switch, got {value!r:.200}."
            )
        found = _replaced(value, self._only_the_folder) if isinstance(value, str) else value
        self.num_characters += len(str(found))
        if self.num_characters > MOST_CHARACTERS:
            raise TooLongError(
                f"The values that ${{...}} names in a file may have {MOST_CHARACTERS:,} characters together, got more "
                f"at ${{{name}}}. Write fewer ${{...}}."
            )
        return found

    def _only_the_folder(self, name: str) -> str:
        if name == "recipe_dir":
            return self.recipe_dir
        raise _WrongReferenceError(
            f"the value of a key that is named holds no reference but ${{recipe_dir}}, got ${{{name}}}."
        )

    def _names(self) -> Iterator[str]:
        yield "recipe_dir"
        for name, inner in self.settings.items():
            yield from (f"{name}.{key}" for key in inner) if isinstance(inner, dict) else (name,)


def _replaced(text: str, value_of: Callable[[str], Any]) -> Any:
    """Return a text with the values of its references; one that is the whole text has the value's own type."""

    def value(found: re.Match[str]) -> Any:
        body = found["body"]
        if resolver := _RESOLVER.match(body):
            raise _WrongReferenceError(f"{found[0]} calls the resolver {resolver[1]}.")
        if not found["end"]:
            raise _WrongReferenceError(
                rf"${{{body} is not closed. Add the }}, or write \${{ for the characters."
            )
        return value_of(body.strip())

    def written(found: re.Match[str]) -> str:
        before = found["pairs"][::2]
        return f"{before}${{" if found["escape"] else f"{before}{value(found)}"

    whole = _REFERENCE.fullmatch(text)
    if whole and not whole["escape"] and not whole["pairs"]:
        return value(whole)
    return _REFERENCE.sub(written, text)


class _WrongReferenceError(Exception):
    """A wrong reference, described in words."""


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


def _written(path: _Path) -> str:
    """Return a path as written, such as ``data.data_files[1]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
