"""No private name of another library is used that the list does not know, and it has none that nobody uses."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
from upstream_names import NAMES_OF, SINCE

from lowmem_ft.foundation.upstream.tested import TESTED, is_before

ROOT = Path(__file__).parents[3]
LISTS = ROOT / "lowmem_ft" / "hf" / "trainers" / "overridden_methods.py"
"""All methods of trainers, which ``tests/hf/trainers/test_overridden_methods.py`` holds to upstream's."""
SOURCES = [path for path in sorted((ROOT / "lowmem_ft").rglob("*.py")) if path != LISTS]
NAMES = {name for names in NAMES_OF.values() for name in names.split()}
KNOWN = NAMES | {owner.rpartition(".")[2] for owner in NAMES_OF}

NOT_UPSTREAM = {
    "_C": "a module; what is taken from it counts",
    "_subclasses": "a package, the same",
    "_replace": "documented, of named tuples",
    "_asdict": "documented, of named tuples",
    "_getframe": "documented, of sys",
    "_current_frames": "documented, of sys",
    "_exit": "documented, of os",
    "_normal_accessor": "of Python 3.10's pathlib, which does not change any more",
    "_attention": "in the names of attention operators",
    "_dynamo": "a folder of torch's sources",
    "_known_values": "ours, on fake tensors",
    "_lowmem_ft_overrides": "ours, on modules",
    "_lowmem_ft_said": "ours, on TrainingArguments",
}
"""Names with an underscore in front that are nobody else's secret, or not names."""

_PRIVATE = re.compile(r"_[A-Za-z]\w*")
_DOTTED = re.compile(rf"({'|'.join(TESTED)})(\.[A-Za-z_]\w*)+")


def names_of(path: Path) -> tuple[set[str], set[str], set[str]]:
    """What a file defines, the private names that it takes, and the dotted names of its strings."""
    defined, taken, dotted = set[str](), set[str](), set[str]()
    ends_of_names = set[ast.AST]()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(
                ast.Name("self" | "cls"), name, ast.Store()
            ):
                defined.add(name)
            case ast.Attribute(attr=name):
                taken.add(name)
            case ast.ImportFrom(module=str(module), names=aliases) if not module.startswith("lowmem_ft"):
                taken.update(module.split("."), (alias.name for alias in aliases))
            case ast.JoinedStr(parts) | ast.Call(
                ast.Attribute(attr="startswith" | "endswith" | "removesuffix"), parts
            ):
                ends_of_names.update(parts)
            case ast.Constant(str(text)) if node not in ends_of_names:
                words = [word for word in text.split() if _DOTTED.fullmatch(word) or _PRIVATE.fullmatch(word)]
                taken.update(*(word.split(".") for word in words))
                dotted.update(filter(_DOTTED.fullmatch, words))
    return defined, set(filter(_PRIVATE.fullmatch, taken)), dotted


@pytest.fixture(scope="module")
def names() -> dict[str, tuple[set[str], set[str], set[str]]]:
    return {str(path.relative_to(ROOT / "lowmem_ft")): names_of(path) for path in SOURCES}


def test_the_list_has_what_the_package_takes_from_upstream(names):
    known = KNOWN.union(NOT_UPSTREAM, *(defined for defined, _, _ in names.values()))
    unknown = {path: sorted(taken - known) for path, (_, taken, _) in names.items() if taken - known}
    assert unknown == {}, "write it into tests/upstream_names.py, or leave it alone"


def test_the_list_has_nothing_that_nobody_uses():
    texts = (re.sub(r"#.*", "", path.read_text()) for path in SOURCES)
    used = {word for text in texts for word in re.findall(r"\w+", text)}
    unused = {name for name in NAMES if not name.endswith("_split_k") and name not in used}
    assert unused == set(), "take them out of tests/upstream_names.py"


def test_what_a_string_names_is_there(names):
    """Modules are looked up in ``sys.modules`` by name, and one that has moved would be taken for one not imported."""
    dotted = set().union(*(of_file for _, _, of_file in names.values()))
    here = {word for word in dotted if importlib.util.find_spec(word.partition(".")[0]) is not None}
    later = tuple(path for path, since in SINCE.items() if is_before(path.partition(".")[0], since))
    here = {word for word in here if not word.startswith(later)}
    assert len(here) > 10
    assert {word for word in here if not is_there(word)} == set()


def is_there(dotted: str) -> bool:
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True
