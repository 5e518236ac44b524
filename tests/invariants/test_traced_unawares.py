"""What trains knows nothing of being traced but ``rounds()``: no counts, no fake tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import lowmem_ft

PACKAGE = Path(lowmem_ft.__file__).parent
TRAINING = ("data", "models", "optimizers", "techniques", "training")


def names_in(source: str) -> Iterator[str]:
    """Every name that code uses or gives, those of modules with what is imported from them."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case (
                ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name))
            ):
                yield name
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases)
            case ast.ImportFrom(module=str(module), names=aliases):
                yield from (f"{module}.{alias.name}" for alias in aliases)


def is_of_a_trace(name: str) -> bool:
    if name.startswith("lowmem_ft.foundation.repetition"):
        return name != "lowmem_ft.foundation.repetition.rounds"
    return name == "times" or "FakeTensor" in name or "_subclasses" in name


def test_what_a_round_stands_for_and_fake_tensors_are_the_tracers():
    sources = [path for folder in TRAINING for path in sorted((PACKAGE / folder).rglob("*.py"))]
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sources
        if (names := sorted(set(filter(is_of_a_trace, names_in(path.read_text())))))
    }
    assert found == {}
    users = [
        path for path in sources if "lowmem_ft.foundation.repetition.rounds" in names_in(path.read_text())
    ]
    assert users  # the walk sees what it looks for
