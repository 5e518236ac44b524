"""No private name of another library is used that the list does not know, and it has none that nobody uses."""

from __future__ import annotations

import ast
import importlib.util
import pkgutil
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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

_PRIVATE = re.compile(r"_[A-Za-z][A-Za-z0-9_]*")
_DOTTED = re.compile(rf"({'|'.join(TESTED)})(\.[A-Za-z_]\w*)+")
_ENDS = ("startswith", "endswith", "removeprefix", "removesuffix")


def is_private(name: str) -> bool:
    return _PRIVATE.fullmatch(name) is not None


def defined_in(tree: ast.Module) -> Iterator[str]:
    """What a file itself gives a name to: functions, classes, variables, attributes of its objects."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_ours(node.value):
            yield node.attr


def is_ours(value: ast.expr) -> bool:
    """Whether an attribute is asked of ``self``, ``cls`` or ``super()``."""
    if isinstance(value, ast.Call):
        value = value.func
    return isinstance(value, ast.Name) and value.id in ("self", "cls", "super")


def names_in_strings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """The words of whole strings; not of docstrings, nor of what is only compared with the end of a name."""
    of_another: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            of_another.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            of_another.update(node.values)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ENDS:
            of_another.update(node.args)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in of_another:
            yield from ((word, node.lineno) for word in node.value.split())


def used_in(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Each private name that a file takes from elsewhere, its line, and whether it is asked of an object of ours."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno, is_ours(node.value)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((name, node.lineno, False) for name in imported_by(node))
    for word, line in names_in_strings(tree):
        if re.fullmatch(r"\w[\w.]*", word):
            yield from ((part, line, False) for part in word.split(".") if is_private(part))


def imported_by(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """The private parts of what is imported; behind a private module, everything."""
    module = "" if isinstance(node, ast.Import) else node.module or ""
    if module.startswith(("lowmem_ft", "__future__")):
        return
    yield from filter(is_private, module.split("."))
    for alias in node.names:
        if any(map(is_private, module.split("."))):
            yield alias.name
        else:
            yield from filter(is_private, alias.name.split("."))


def unknown_names(
    own: set[str], used: Iterable[tuple[str, int, bool]], defined_elsewhere: set[str]
) -> Iterator[str]:
    for name, line, is_of_ours in used:
        known = own | defined_elsewhere if is_of_ours else own
        if name not in KNOWN | NOT_UPSTREAM.keys() | known:
            yield f"{line}: {name}"


@dataclass(frozen=True)
class Names:
    """Those of a file: what it defines, what it takes from elsewhere, and the dotted names in its strings."""

    defined: set[str]
    used: list[tuple[str, int, bool]]
    dotted: set[str]

    @classmethod
    def of(cls, path: Path) -> Names:
        tree = ast.parse(path.read_text())
        words = {word for word, _ in names_in_strings(tree)}
        return cls(set(defined_in(tree)), list(used_in(tree)), set(filter(_DOTTED.fullmatch, words)))


@pytest.fixture(scope="module")
def names() -> dict[str, Names]:
    return {str(path.relative_to(ROOT / "lowmem_ft")): Names.of(path) for path in SOURCES}


def test_the_list_has_what_the_package_takes_from_upstream(names):
    defined_anywhere = {name for of_file in names.values() for name in of_file.defined}
    unknown = {
        path: sorted(set(unknown_names(of_file.defined, of_file.used, defined_anywhere)))
        for path, of_file in names.items()
    }
    unknown = {path: found for path, found in unknown.items() if found}
    assert unknown == {}, "write it into tests/upstream_names.py, or leave it alone"


def test_the_list_has_nothing_that_nobody_uses():
    texts = (re.sub(r"#.*", "", path.read_text()) for path in SOURCES)
    used = {word for text in texts for word in re.findall(r"\w+", text)}
    unused = {name for name in NAMES if not name.endswith("_split_k") and name not in used}
    assert unused == set(), "take them out of tests/upstream_names.py"


def test_what_a_string_names_is_there(names):
    """Modules are looked up in ``sys.modules`` by name, and one that has moved would be taken for one not imported."""
    dotted = {word for of_file in names.values() for word in of_file.dotted}
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
