"""Sweeps of which `make test` takes a few."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def few_quick(values: Iterable[Any], quick: Container[Any]) -> list[Any]:
    """Values for ``parametrize``; those that are not among the quick ones are marked slow.

    Args:
        values: all of them; one that is a tuple is several arguments.
        quick: those that `make test` takes, too.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in quick else [pytest.mark.slow],
        )
        for value in values
    ]
