"""The keys of how the gradients of several micro-batches are summed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowmem_ft.foundation.knob import Effect, knob
from lowmem_ft.foundation.memory.least_memory import PARTS_BY_TOKENS, Held, StepFacts, as_it_is, gone_unless


def _of_all_micro_batches(held: Held, order: str, step: StepFacts) -> Held:
    return held.scaled(step.num_micro_batches) if order == "vertical" else held


def _summed_in_weights_type(held: Held, dtype: str, step: StepFacts) -> Held:
    return held.scaled(step.weight_itemsize / 4) if dtype == "weights" else held


@dataclass(frozen=True, kw_only=True)
class AccumulationConfig:
    """The order in which the micro-batches of one optimizer step pass through the model, and how gradients are summed.

    A plan tries ``fusion`` without consent, since it gives up nothing: a product is not rounded to 16 bits before it is
    added to the sum, and a recipe without it rounds more. It is off by default, as it changes what a recipe trains by
    that rounding.
    """

    order: Literal["horizontal", "vertical"] = knob(
        "horizontal",
        "horizontal: one micro-batch after the other through all layers; vertical: all micro-batches through one "
        "layer after the other.",
        frees="vertical: gradients are finished layer by layer, so that the optimizer can step inside backward",
        costs="vertical: the layers' inputs of all micro-batches live at once",
        effects={
            "vertical": Effect(
                needs_checkpointed="every layer",
                saves=False,
                traits=("whole window at once", "idle with one micro-batch"),
            )
        },
        search_values=("horizontal", "vertical"),
        remaining_bytes={
            **dict.fromkeys(PARTS_BY_TOKENS, _of_all_micro_batches),
            "sums": gone_unless("horizontal"),
        },
    )
    dtype: Literal["float32", "weights"] = knob(
        "float32",
        "Type in which the gradients of several micro-batches are summed; weights: the weights' own.",
        frees="weights: 2 bytes a parameter with bfloat16 weights and horizontal order",
        costs="weights: each micro-batch's share is rounded to the sum's 8 bits",
        effects={
            "weights": Effect(
                fidelity="other mathematics", consent="bf16_sums", traits=("idle with one micro-batch",)
            )
        },
        search_values=("float32", "weights"),
        remaining_bytes={"sums": _summed_in_weights_type},
    )
    fusion: bool = knob(
        False,
        "Add the product that computes a 16-bit weight's gradient to the sum at once.",
        frees="6 bytes a weight of one linear layer at a time, and of the head; with dtype=weights 2 bytes",
        costs="nothing: a product, a cast and a sum become one kernel; a micro-batch's share is not rounded any more",
        effects={True: Effect(engines=(), traits=("idle with one micro-batch",))},
        search_values=(False, True),
        remaining_bytes={"sums": as_it_is},
        is_kernel=True,
    )
