"""Arguments of transformers' learning rate schedules, to check them without importing torch.

A test compares the table with the functions themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from lowmem_ft.foundation.errors import did_you_mean

_MIN_LR = ("min_lr", "min_lr_rate")

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "constant": (),
    "constant_with_warmup": (),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("num_cycles", *_MIN_LR),
    "cosine_warmup_with_min_lr": ("num_cycles", *_MIN_LR, "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}
"""Arguments by the name of the schedule, without the optimizer and the numbers of steps."""

ONE_OF: dict[str, tuple[str, ...]] = {
    "cosine_with_min_lr": _MIN_LR,
    "cosine_warmup_with_min_lr": _MIN_LR,
    "warmup_stable_decay": ("num_decay_steps",),
}
"""Arguments of which a schedule needs exactly one."""

SHAPES = ("linear", "cosine", "1-sqrt")
"""Values of the arguments that end in ``_type``; the others are numbers."""


_ABOVE_ZERO = ("num_cycles", "power", "timescale")
_FROM_ZERO = ("lr_end", *_MIN_LR, "warmup_lr_rate", "num_decay_steps", "num_stable_steps", "min_lr_ratio")
"""Arguments by their range: beyond it the schedule divides by zero, or has a learning rate that is negative or none."""

_LR_END = 1e-7
"""transformers' own ``lr_end``."""


def schedule_problems(name: str, arguments: Mapping[str, Any], learning_rate: float) -> Iterator[str]:
    """Yield what is wrong with a schedule's further arguments.

    Args:
        name: ``training.lr_scheduler_type``.
        arguments: ``training.lr_scheduler_kwargs``.
        learning_rate: ``training.learning_rate``.

    Yields:
        A sentence for each problem.
    """
    takes, needs = ARGUMENTS[name], ONE_OF.get(name, ())
    where = f"training.lr_scheduler_kwargs of training.lr_scheduler_type={name}"
    for unknown in arguments.keys() - set(takes):
        listed = f"it takes {', '.join(takes)}" if takes else "it takes no arguments"
        yield f"{where} has no `{unknown}`: {listed}.{did_you_mean(str(unknown), takes)}"
    given = [argument for argument in needs if arguments.get(argument) is not None]
    if needs and len(given) != 1:
        example = f"training.lr_scheduler_kwargs.{needs[-1]}={0.1 if needs is _MIN_LR else 200}"
        yield (
            f"{where} must hold {'exactly one of ' if len(needs) > 1 else ''}{', '.join(needs)}, got "
            f"{dict(arguments) or 'nothing'}. Set for instance {example}."
        )
    for argument in takes:
        value = arguments.get(argument)
        if value is not None and not _is_fit(argument, value):
            kind = f"one of {', '.join(SHAPES)}" if argument.endswith("_type") else "a number"
            yield f"{where}: `{argument}` must be {kind}, got {value!r}."
        elif argument in _ABOVE_ZERO and value is not None and not 0 < value < math.inf:
            yield f"{where}: `{argument}` must be above 0, got {value!r}. Set for instance {argument}: 1."
        elif argument in _FROM_ZERO and value is not None and not 0 <= value < math.inf:
            yield (
                f"{where}: `{argument}` must be at least 0, as no learning rate is negative, got {value!r}. Set for "
                f"instance {argument}: 0."
            )
    if (
        name == "polynomial"
        and _is_fit("lr_end", end := arguments.get("lr_end", _LR_END))
        and end >= learning_rate
    ):
        yield (
            f"{where}: `lr_end` must be below training.learning_rate={learning_rate}, from which it falls, got {end}. "
            "Set for instance lr_end: 0."
        )


def _is_fit(argument: str, value: object) -> bool:
    if argument.endswith("_type"):
        return value in SHAPES
    return isinstance(value, (int, float)) and not isinstance(value, bool)
