"""Every private name of another library that the package relies on is there."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import pkgutil
import re

import pytest
import torch.nn.attention.varlen  # noqa: F401 - registers its operators
from upstream_names import BEFORE, NAMES_OF, SINCE

from lowmem_ft.foundation.upstream.tested import is_before

NAMES = [(owner, name) for owner, names in NAMES_OF.items() for name in names.split()]


def is_there(owner, name):
    """Whether an owner has a name, or its source sets it on objects."""
    with contextlib.suppress(
        ModuleNotFoundError, AttributeError
    ):  # it may be one that objects get when they are made
        pkgutil.resolve_name(f"{owner}.{name}")
        return True
    try:
        source = inspect.getsource(pkgutil.resolve_name(owner))
    except (ModuleNotFoundError, AttributeError, TypeError, OSError):  # the owner is gone, or written in C++
        return False
    return re.search(rf"\b{name}\b", source) is not None


@pytest.mark.parametrize("owner, name", NAMES, ids=[".".join(pair) for pair in NAMES])
def test_the_name_is_there(owner, name):
    path, library = f"{owner}.{name}", owner.partition(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    is_later = any(path.startswith(later) and is_before(library, since) for later, since in SINCE.items())
    is_gone = path in BEFORE and not is_before(library, BEFORE[path])
    if is_later or is_gone:
        pytest.skip(f"other versions of {library} have it")
    assert is_there(owner, name), f"{path} is gone; tests/upstream_names.py says what it is needed for"


@pytest.mark.parametrize(
    "owner", ["torch.Tensor", "torch.nn.Module", "torch.no_such_module", "transformers.modeling_utils"]
)
def test_a_name_that_is_gone_is_found(owner):
    assert not is_there(owner, "_name_of_a_later_version")
