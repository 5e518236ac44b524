"""How the package imports itself."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")
def test_contributing_lists_the_layers_that_lint_imports_checks():
    import tomllib

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contract = pyproject["tool"]["importlinter"]["contracts"][0]
    listed = re.search(r"## Layers\n.*?```\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)
    assert listed is not None
    assert listed[1].splitlines() == contract["layers"]


@pytest.fixture(scope="module")
def trees():
    """Each module's syntax tree, by its name."""
    return {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


@pytest.fixture(scope="module")
def imports(trees):
    """What each module imports when it runs, by its name."""
    return {name: set(imported_by(name, tree)) for name, tree in trees.items()}


def test_no_module_imports_one_that_imports_it(imports):
    """Nor within functions, where a circle would only be hidden."""
    imports = {name: of_it & set(MODULES) - {name} for name, of_it in imports.items()}
    assert sum(map(len, imports.values())) > 500
    graphlib.TopologicalSorter(imports).prepare()  # raises a CycleError that names the circle


def test_modules_import_ours_at_their_top(trees):
    """Except for commands, which start faster so."""
    within = [
        f"{name}: {ast.unparse(node)}"
        for name, tree in trees.items()
        if not name.startswith("lowmem_ft.cli")
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, (ast.Import, ast.ImportFrom)) and "lowmem_ft" in ast.unparse(node)
    ]
    assert within == []


def test_what_only_its_own_file_uses_is_private(trees):
    """Except for rules, whose decorator lists them, what ``__all__`` names, and what is part of a public name."""
    folders = ("scripts/**/*.py", "tests/support/**/*.py", "docs/*.md", "*.md")
    files = [*MODULES.values(), *(file for folder in folders for file in ROOT.glob(folder))]
    users = Counter(word for path in files for word in set(re.findall(r"\w+", path.read_text())))
    published = {
        word
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for word in re.findall(r"\w+", ast.unparse(node.value))
    }
    found = []
    for name, tree in trees.items():
        for node in tree.body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
                continue
            is_rule = any(ast.unparse(decorator).startswith("reads(") for decorator in node.decorator_list)
            others = (word for other in tree.body if other is not node for word in public_words(other))
            if users[node.name] == 1 and not is_rule and node.name not in {*published, *others}:
                found.append(f"{name}.{node.name}")
    assert found == []


def public_words(statement):
    """The words in a statement's public signatures, annotations and base classes, and in tables at module level."""
    is_table = isinstance(statement, (ast.Assign, ast.AnnAssign))
    parts = [statement] if is_table else []
    for node in ast.walk(statement):
        if isinstance(node, ast.FunctionDef) and (node.name == "__init__" or not node.name.startswith("_")):
            parts += [node.args, node.returns]
        elif isinstance(node, ast.AnnAssign):
            parts.append(node.annotation)
        elif isinstance(node, ast.ClassDef):
            parts += node.bases
    return {word for part in parts if part is not None for word in re.findall(r"\w+", ast.unparse(part))}


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in (ROOT / "lowmem_ft").rglob("*.py")
}


def imported_by(importer, tree):
    """What a module imports when it runs, by full name; not the packages around it, nor what serves type checkers."""
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer} imports by a relative name"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in MODULES else node.module for name in modules)


def test_no_two_rooms_beside_each_other_import_each_other(imports):
    """Only a type may be named both ways."""
    rooms = {name: path.relative_to(ROOT).parent for name, path in MODULES.items()}
    arrows = {
        (rooms[name], rooms[other]) for name, of_it in imports.items() for other in of_it & MODULES.keys()
    }
    both_ways = {(one, other) for one, other in arrows if one < other and (other, one) in arrows}
    assert len(arrows) > 200
    assert {(one, other) for one, other in both_ways if one not in other.parents} == set()


def test_memory_is_values_that_need_no_torch(imports):
    seen = {name for name in MODULES if name.startswith("lowmem_ft.foundation.memory.")}
    assert len(seen) > 10
    while new := {found for name in seen for found in imports[name] if found in MODULES} - seen:
        seen |= new
    outside = {module.partition(".")[0] for name in seen for module in imports[name]}
    assert "torch" not in outside, sorted(outside)
