"""Parts of the least memory that a step needs, and what a memory knob leaves of each.

A planner starts from a step without any technique and lets each knob state, in the recipe's order, what its value
leaves of a part. It calls what does not fit even so proven not to fit, so a statement may leave too little, never too
much. A knob without statements may free anything: while it is on, nothing of any part counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from lowmem_ft.foundation.parallel_plan import ParallelPlan

Part = Literal[
    "layers",
    "outer",
    "rest",
    "gathered",
    "state",
    "gradients",
    "sums",
    "saved",
    "inputs",
    "activations",
    "logits",
]
"""Parts of a step's least memory.

layers, outer, rest: weights of the decoder layers, of embedding and head, and all others; gathered: weights that
sharing processes hold whole between forward and backward; state: the optimizer's, with master tensors; gradients: at
the end of the last backward pass; sums: gradients of several micro-batches, from the first to the last; saved: copies
of trained weights while a model is saved; inputs: those of checkpointed layers; activations: those of all other layers;
logits: those of the model's own loss.
"""

PARTS: tuple[Part, ...] = get_args(Part)


class Held(NamedTuple):
    """The bytes of a part by place, and those that cross the host link in each step."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0
    link: float = 0.0

    def scaled(self, share: float) -> Held:
        """Return a share of it."""
        return Held(*(share * of for of in self))

    def on_host(self, *, crosses: bool = False) -> Held:
        """Return it moved from the device to the host, from where it crosses the link in each step or not."""
        return self._replace(
            device=0.0, host=self.host + self.device, link=self.link + (self.device if crosses else 0.0)
        )


NOTHING = Held()

StepParts = Mapping[Part, Held]
"""Maps each part to what is left of it; the values are arrays if it covers many recipes at once."""


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """Facts of a step that a statement may read, in addition to its own value.

    Args:
        num_layers: decoder layers.
        share_checkpointed: share of them that are checkpointed.
        num_micro_batches: micro-batches between two updates.
        layer_input_bytes: bytes of a layer's input, for one micro-batch.
        weight_itemsize: bytes of an element of the weights.
        packed_itemsize: least bytes of an element of the layers' weights, if the checkpoint holds them packed.
        trains_all: whether all weights are trained.
        clips: whether gradients are clipped by their global norm.
        steps_in_backward: whether the optimizer steps in backward.
        plan: the processes that share the model.
    """

    num_layers: int
    share_checkpointed: float
    num_micro_batches: int
    layer_input_bytes: int
    weight_itemsize: int
    trains_all: bool
    clips: bool
    steps_in_backward: bool
    plan: ParallelPlan
    packed_itemsize: float | None = None


Statement = Callable[[Held, Any, StepFacts], Held]
"""Returns what a knob's value leaves of a part: takes what the knobs before it leave, the value, and the facts.

It reads facts only of knobs that state something of the same part.
"""


def as_it_is(held: Held, value: Any, step: StepFacts) -> Held:
    """Leave a part as it is: its size, or another knob's statement, reads the value."""
    return held


def gone_unless(*values: Any) -> Statement:
    """Return the statement that nothing is left of a part, except at these values."""
    return lambda held, value, step: held if value in values else NOTHING


def on_host_at(place: Any, *, crosses: bool = False) -> Statement:
    """Return the statement that a part is on the host at this value, and crosses the link in each step or not."""
    return lambda held, value, step: held.on_host(crosses=crosses) if value == place else held


PARTS_BY_TOKENS: Mapping[Part, Statement] = dict.fromkeys(("inputs", "activations", "logits"), as_it_is)
"""Statements of a knob that decides how many tokens exist at once, or the bytes that these have."""
