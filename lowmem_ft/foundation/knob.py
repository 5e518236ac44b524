"""A recipe field that documents itself: what it does, frees and costs in words, and what programs read of it.

``lowmem-ft recipes NAME`` prints the words; ``docs/memory_ladder.md`` has the table of both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Cost = Literal["nothing", "time", "host link", "disk"]
"""What is paid for memory, from the least to the most.

nothing: as fast, but for smaller kernels; time: something is computed again or converted; host link: bytes cross PCIe
in each step; disk: bytes come from a disk and go back to it in each step.
"""

Fidelity = Literal["exact", "unbiased rounding", "other mathematics"]
"""What becomes of the numbers, from the best to the worst; each is one of the three and never something between.

exact: float32 AdamW's own, up to the order of sums; unbiased rounding: errors go either way and do not add up from step
to step (numbers are rounded at random where they are kept, to nearest where they are used once); other mathematics:
another model, other data or another update, or a rounding that loses what is small.
"""

Checkpointed = Literal["no layer", "some layers", "every layer"]
"""Which decoder layers are checkpointed, or have to be."""

COSTS: tuple[Cost, ...] = get_args(Cost)
FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)


Engine = Literal["ddp", "fsdp2", "zero2", "zero3"]
"""What has several processes train one model; the values of ``distributed.strategy`` but none."""

ENGINES: tuple[Engine, ...] = get_args(Engine)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """What comes with a value of a memory knob; rules, remediations and tables read it instead of naming the knob.

    Args:
        cost: what is paid for the memory.
        fidelity: what becomes of the numbers.
        needs_checkpointed: which layers have to be checkpointed.
        engines: with which of several processes' engines it works; a test or a trace shows each.
        consent: the word in ``plan.allow`` without which a planner does not choose the value; empty: none is needed.
    """

    cost: Cost = "nothing"
    fidelity: Fidelity = "exact"
    needs_checkpointed: Checkpointed = "no layer"
    engines: tuple[Engine, ...] = ENGINES
    consent: str = ""


NO_EFFECT = Effect()

CountedLayers = Literal["", "period", "last"]

Effects = Mapping[Any, Effect] | Effect
"""The effect of each value that has one, or one for every value but that which switches the knob off."""


def knob(
    default: Any,
    help: str,
    *,
    frees: str | None = None,
    costs: str | None = None,
    effects: Effects | None = None,
    off: Any = None,
    counts_layers: CountedLayers = "",
    tries: Sequence[Any] = (),
) -> Any:
    """A dataclass field with its documentation.

    Args:
        default: the value where a recipe says nothing; a mutable one (list, dict) is copied for each instance.
        help: one sentence, with the unit and the meaning of special values.
        frees: for a memory knob, the bytes it gives back.
        costs: for a memory knob, what it takes in time or fidelity.
        effects: for a memory knob, what comes with its values.
        off: where one effect stands for all values: the value without it.
        counts_layers: where its value is a number of decoder layers, how an estimate, which traces a model with fewer
            of them, has to reckon with it: as a ``period`` after which they repeat, and a margin at the end; or as the
            ``last`` layers, which repeat by themselves.
        tries: the values that a planner may choose from, beside the recipe's own, from what needs most memory to what
            is meant to need least; empty: it leaves the key alone.

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
        "tries": tuple(tries),
    }
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
