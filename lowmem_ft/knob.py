"""A recipe field that documents itself: ``lowmem-ft recipes NAME`` prints what each one does, frees and costs."""

from __future__ import annotations

import dataclasses
from typing import Any


def knob(default: Any, help: str, *, frees: str | None = None, costs: str | None = None) -> Any:
    """A dataclass field with its documentation.

    Args:
        default: the value where a recipe says nothing; a mutable one (list, dict) is copied for each instance.
        help: one sentence, with the unit and the meaning of special values.
        frees: for a memory knob, the bytes it gives back.
        costs: for a memory knob, what it takes in time or fidelity.

    Returns:
        A ``dataclasses.field`` whose metadata holds the three texts.
    """
    metadata = {"help": help, "frees": frees, "costs": costs}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
