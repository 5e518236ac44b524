"""How many files know a technique by name: other code asks for effects and traits (``foundation/knob.py``) instead.

A file mentions a technique if its code, docstrings and comments apart, has

- an import of one of the technique's modules, or of a name from there;
- one of its recipe keys: as attributes (``recipe.offload.parameters``), in a text (``"offload.parameters"``), as a
  field of the dataclass that declares it, or as an argument of that (``OffloadConfig(parameters=...)``);
- one of its words in a name or a text.

``activation_offloading`` is TRL's name for TRL's own technique, so it does not count.
"""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lowmem_ft"

AT_MOST = 8


@dataclass(frozen=True)
class Known:
    """A technique: where it is at home, the recipe's keys for it, and the words by which it is known."""

    home: str
    keys: tuple[str, ...]
    words: str


TECHNIQUES = {
    "streaming": Known(
        home="techniques/streaming/",
        keys=("offload.parameters", "offload.resident_layers"),
        words="parameter[_ ]?streaming|stream(ed|s|ing)?[_ ](float32 )?(weights?|layers?|head)|resident_layers",
    ),
    "optimizer offload": Known(
        home="techniques/offload/optimizer_offload.py",
        keys=("offload.optimizer",),
        words="optimizer_?offload|state_on_host",
    ),
    "vertical order": Known(
        home="techniques/accumulation/vertical_accumulation.py",
        keys=("accumulation.order",),
        words="vertical",
    ),
    "activation offload": Known(
        home="techniques/offload/activation_offload.py",
        keys=("offload.activations",),
        words="activations?_?offload(?!ing)",
    ),
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_few_files_know_a_technique_by_name(name):
    known = TECHNIQUES[name]
    mentions = {path: found for path in PACKAGE.rglob("*.py") if (found := mentions_in(path, known))}
    assert any(known.home in path.as_posix() for path in mentions)  # the words are those that are used
    others = {path: found for path, found in mentions.items() if known.home not in path.as_posix()}
    listing = "\n".join(f"{path.relative_to(PACKAGE)}: {found}" for path, found in sorted(others.items()))
    assert len(others) <= AT_MOST, f"{len(others)} files mention {name}:\n{listing}"


def mentions_in(path: Path, known: Known) -> list[str]:
    """Return the mentions in a file, each with its line."""
    patterns = [rf"\b{re.escape(key)}\b" for key in known.keys]
    is_mention = re.compile("|".join([*patterns, known.words]), re.IGNORECASE)
    texts, together = all_texts(path)
    if not is_mention.search(together):  # most files have none, and one search is sooner done than thousands
        return []
    return [f"{line} {text[:50]!r}" for line, text in texts if is_mention.search(text)]


@functools.cache
def all_texts(path: Path) -> tuple[list[tuple[int, str]], str]:
    """Return a file's texts, and the same as one."""
    texts = list(texts_in(path))
    return texts, "\n".join(text for _, text in texts)


def texts_in(path: Path):
    """Yield the names and texts of a file's code, each with its line."""
    tree = ast.parse(path.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute():
                yield node.lineno, ast.unparse(node)
            case ast.Name():
                yield node.lineno, node.id
            case ast.arg():
                yield node.lineno, node.arg
            case ast.FunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name):
                yield node.lineno, name
                for field in node.body:
                    if isinstance(field, ast.AnnAssign):
                        yield field.lineno, f"{group_of(name)}.{ast.unparse(field.target)}"
            case ast.Call(func=called):
                for keyword in node.keywords:
                    yield keyword.value.lineno, f"{group_of(ast.unparse(called))}.{keyword.arg}"
            case ast.ImportFrom(module=module) if module:
                yield node.lineno, module
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.Constant(value=str() as text) if id(node) not in bare:
                yield node.lineno, text


def group_of(class_name: str) -> str:
    """Return the recipe's group that a class declares: ``offload`` for ``OffloadConfig``."""
    return class_name.rpartition(".")[2].removesuffix("Config").lower()
