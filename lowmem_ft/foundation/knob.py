"""A recipe field that documents itself: its purpose, savings and costs in words, and its effects for programs.

``lowmem-ft recipes NAME`` prints the words; ``docs/memory_ladder.md`` has the table of both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Cost = Literal["nothing", "time", "host link", "disk"]
"""The price of the memory saved, from the least to the most.

nothing: as fast, except for smaller kernels; time: something is recomputed or converted; host link: bytes cross PCIe
in each step; disk: each step reads bytes from a disk and writes them back.
"""

Fidelity = Literal["exact", "unbiased rounding", "other mathematics"]
"""Fidelity of the numbers, from the best to the worst; every value is one of the three, never something between.

exact: float32 AdamW's own, up to the order of sums; unbiased rounding: errors go either way and do not add up from step
to step (numbers are rounded at random where they are kept, to nearest where they are used once); other mathematics:
another model, other data or another update, or a rounding that loses small values.
"""

Checkpointed = Literal["no layer", "some layers", "every layer"]
"""The decoder layers that are checkpointed, or have to be."""

COSTS: tuple[Cost, ...] = get_args(Cost)
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)


Engine = Literal["ddp", "fsdp2", "zero2", "zero3"]
"""The engines by which several processes train one model: the values of ``distributed.strategy`` except none."""

ENGINES: tuple[Engine, ...] = get_args(Engine)

Trait = Literal[
    "weights on host",
    "state on host",
    "activations on host",
    "layers fetched ahead",
    "whole window at once",
    "idle with one micro-batch",
    "updates in backward",
    "no loss scale",
]
"""Properties of a value that other code asks for instead of naming the technique.

weights on host: weights are stored in host memory, and on the device only while they are needed; state on host: the
optimizer's state and masters are; activations on host: what backward needs of a layer is; layers fetched ahead: data of
a layer is sent to the device while the layer before is computed, so that the first layer differs; whole window at once:
forward takes all micro-batches of a step together; idle with one micro-batch: a step of one micro-batch is the same
without the value; updates in backward: weights are updated before backward has ended; no loss scale: gradients of
trained weights are used before backward has brought a loss scale.
"""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The effect of one value of a memory knob; rules, remediations and tables read it instead of naming the knob.

    Args:
        cost: price of the memory saved.
        fidelity: fidelity of the numbers.
        needs_checkpointed: which layers have to be checkpointed.
        engines: engines of several processes with which it works; a test or a trace shows each.
        consent: the word in ``plan.allow`` without which a planner does not choose the value; empty: none is needed.
        saves: whether the value frees memory by itself; False: it only makes values of other knobs possible.
        traits: its properties, which ``recipe.reading.keys.key_with`` looks for in a recipe.
    """

    cost: Cost = "nothing"
    fidelity: Fidelity = "exact"
    needs_checkpointed: Checkpointed = "no layer"
    engines: tuple[Engine, ...] = ENGINES
    consent: str = ""
    saves: bool = True
    traits: tuple[Trait, ...] = ()


NO_EFFECT = Effect()

CountedLayers = Literal["", "period", "last"]

Effects = Mapping[Any, Effect] | Effect
"""The effect of each value that has one, or one effect for every value except the one that switches the knob off."""

RemainingBytes = Mapping[Any, Callable[..., Any]]
"""A statement by part, see ``foundation/memory/least_memory.py``."""


def knob(
    default: Any,
    help: str,
    *,
    frees: str | None = None,
    costs: str | None = None,
    effects: Effects | None = None,
    off: Any = None,
    counts_layers: CountedLayers = "",
    search_values: Sequence[Any] = (),
    planned: Sequence[Any] = (),
    remaining_bytes: RemainingBytes | None = None,
    is_kernel: bool = False,
) -> Any:
    """Make a dataclass field with its documentation.

    Args:
        default: the value if a recipe does not set it; a mutable one (list, dict) is copied for each instance.
        help: one sentence, with the unit and the meaning of special values.
        frees: for a memory knob, the bytes it gives back.
        costs: for a memory knob, its cost in time or fidelity.
        effects: for a memory knob, the effects of its values.
        off: if one effect applies to all values: the value without it.
        counts_layers: if the value is a number of decoder layers, how an estimate, which traces a model with fewer
            layers, accounts for it: as a ``period`` after which they repeat, with a margin at the end; or as the
            ``last`` layers, which repeat by themselves.
        search_values: the values that a planner may choose from, in addition to the recipe's own, from the one that
            needs most memory to the one meant to need least; empty: the planner leaves the key alone.
        planned: the values that the planner searches, if it searches more than are worth suggesting to a user; empty:
            those of ``search_values``.
        remaining_bytes: for a memory knob, the statement of what its value leaves of each part of a step's least memory
            that it moves (``foundation/memory/least_memory.py``); None: unknown, so that nothing is proven not to fit
            while it is on.
        is_kernel: whether its values compute the same mathematics by other kernels, which round differently: a resumed
            run keeps its own, unless ``training.resume_with_other_kernels`` lets it change.

    Returns:
        A ``dataclasses.field`` whose metadata holds all of it.
    """
    metadata = {
        "help": help,
        "frees": frees,
        "costs": costs,
        "effects": effects,
        "off": off,
        "counts_layers": counts_layers,
        "search_values": tuple(search_values),
        "planned": tuple(planned or search_values),
        "remaining_bytes": remaining_bytes,
        "is_kernel": is_kernel,
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def as_typed(value: Any) -> str:
    """Return a value as a user types it in a setting."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_typed(inner)}' for key, inner in value.items())}}}"
    return str(list(value) if isinstance(value, tuple) else value)
