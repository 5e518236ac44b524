"""The ``plan`` keys of a recipe: whether the planner chooses its memory settings, and which changes it may make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from lowmem_ft.foundation.errors import did_you_mean
from lowmem_ft.foundation.knob import knob

Consent = Literal["shorter_rows", "lora", "qlora", "plain_bf16", "stochastic_rounding", "bf16_sums"]
"""Changes to the mathematics that a plan may make if allowed; each is the ``consent`` of some knob's value."""

INCLUDED: Mapping[str, Consent] = {"qlora": "lora"}
"""Consents that include another: a user who allows the first is not asked for the second where both are needed."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The choice of the memory knobs for the budget: whether a plan makes it, and which knobs it may change."""

    mode: Literal["none", "auto"] = knob(
        "none",
        "auto: before training, choose the memory settings with which a step is fastest inside the budget; none: "
        "train the recipe unchanged.",
    )
    allow: tuple[Consent, ...] = knob(
        (),
        "Changes of the mathematics that a plan may make if nothing else fits, the least important first, such as "
        "[lora, qlora]; empty: none.",
    )
    keep: tuple[str, ...] = knob(
        (), "Keys that a plan must not change, such as [optimizer.state, checkpointing.mode]."
    )

    def problems(self) -> Iterator[str]:
        """Yield the rules that these values break by themselves."""
        known = get_args(Consent)
        for word in self.allow:
            if word not in known:
                yield (
                    f"plan.allow takes {', '.join(known)}, got {word}.{did_you_mean(word, known)} Name what may "
                    "be given up by one of these."
                )
        for name, words in (("allow", self.allow), ("keep", self.keep)):
            if twice := sorted({word for word in words if words.count(word) > 1}):
                yield f"plan.{name} must not repeat a name, got {', '.join(twice)} twice. Leave one out."
