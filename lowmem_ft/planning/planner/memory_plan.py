"""The result of planning: the chosen recipe, the reasons, the alternatives, and what more memory would buy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys

SCHEMA = 1

NOT_ESTIMATED = "not estimated"
"""Reason against a knob's value that the search did not get to."""

Binding = Literal["device", "host", "time"]
"""Limit on the speed of a step: device or host memory, or ``time`` if more memory would not help."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One combination of settings and its estimated needs.

    Args:
        overrides: what it changes of the recipe, by dotted key.
        device_bytes: device memory of the process, at the upper end of its range.
        host_bytes: host memory.
        step_seconds: seconds of one step; None if the device has no timing model.
    """

    overrides: Mapping[str, Any]
    device_bytes: int
    host_bytes: int
    step_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A combination that was not chosen.

    Args:
        overrides: what it changes of the recipe.
        reason: why not, with the bytes or seconds that decided.
    """

    overrides: Mapping[str, Any]
    reason: str


@dataclass(frozen=True, kw_only=True)
class KnobChoice:
    """The reason why one knob does not keep a value that needs more memory.

    Args:
        setting: the chosen one, as it is typed.
        cheaper: the next value that needs more memory.
        reason: the reason against it, all else as chosen; :data:`NOT_ESTIMATED` if the search did not get to it.
    """

    setting: str
    cheaper: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Purchase:
    """The speed that more memory would buy, among all that was estimated.

    Args:
        of: device or host.
        extra_bytes: how much more of it.
        step_seconds: seconds of a step with that much more.
        overrides: the settings that use it.
    """

    of: Literal["device", "host"]
    extra_bytes: int
    step_seconds: float
    overrides: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Numbers of combinations, by what became of each.

    Args:
        estimated: estimated on the virtual GPU.
        refused: excluded by a rule of the recipe, the device or the model.
        beyond_bytes: cannot fit: weights, state and gradients alone exceed the memory.
        beyond_seconds: cannot be faster: the products or the copies alone take longer than the chosen step.
        left: none of these; one of them may be faster than the plan.
    """

    estimated: int
    refused: int
    beyond_bytes: int
    beyond_seconds: int
    left: int

    @property
    def considered(self) -> int:
        """All combinations except those left."""
        return self.estimated + self.refused + self.beyond_bytes + self.beyond_seconds


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The fastest settings found to fit, or the nearest to fitting.

    Args:
        recipe: the recipe with the settings and with ``plan.mode`` none, so that it trains as it is.
        estimate: the estimate of that recipe.
        fits: whether it fits, with enough headroom not to be tight.
        overrides: what the plan changes of the recipe, by dotted key.
        alternatives: others that fit, each with less memory of one kind than all faster ones.
        rejected: estimated combinations that do not fit or cannot be built, the nearest first.
        knobs: for each knob that was moved, the reason against the next cheaper value.
        purchases: what more device or host memory would buy.
        fused_kernels: the plan with Liger's kernels, where they are known to make a step faster; else None.
        packing: the plan with several documents in a row, where that makes a step of as many tokens faster; else None.
        binds: what keeps a step from being faster.
        counts: combinations by what became of them.
        left_seconds: least seconds of a step of the combinations left; 0 if none is left.
        interrupted: whether the user ended the search.
        missing_device_bytes: if it does not fit, what the device lacks, headroom included.
        missing_host_bytes: likewise of the host.
        smallest_gpu: if it does not fit, the smallest GPU of the catalogue that would be enough, and of those of equal
            size the cheapest to rent; None: not known.
        num_gpus: GPUs that share the recipe, if their number was searched for; else 1.
        too_few_gpus: numbers of GPUs on which nothing was found to fit.
        given_up: words of ``plan.allow`` that the plan uses.
        seconds: seconds that planning took.
    """

    recipe: Recipe
    estimate: MemoryEstimate
    fits: bool
    overrides: Mapping[str, Any]
    alternatives: tuple[Choice, ...] = ()
    rejected: tuple[Rejected, ...] = ()
    knobs: tuple[KnobChoice, ...] = ()
    purchases: tuple[Purchase, ...] = ()
    fused_kernels: Choice | None = None
    packing: Choice | None = None
    binds: tuple[Binding, ...] = ()
    counts: Counts = field(
        default_factory=lambda: Counts(estimated=0, refused=0, beyond_bytes=0, beyond_seconds=0, left=0)
    )
    left_seconds: float = 0.0
    interrupted: bool = False
    missing_device_bytes: int = 0
    missing_host_bytes: int = 0
    smallest_gpu: str | None = None
    num_gpus: int = 1
    too_few_gpus: tuple[int, ...] = ()
    given_up: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def searched(self) -> int:
        """Number of combinations considered: estimated, or proven not to fit or not to be faster."""
        return self.counts.considered

    @property
    def is_proven(self) -> bool:
        """True if the plan fits and no combination is left that could be faster."""
        return self.fits and self.counts.left == 0

    @property
    def settings(self) -> tuple[str, ...]:
        """The overrides as they are typed."""
        return typed(self.overrides)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON types, by the names of the published schema."""
        return {
            "schema": SCHEMA,
            "fits": self.fits,
            "chosen": {"overrides": dict(self.overrides), "estimate": self.estimate.to_json()},
            "alternatives": [asdict(choice) for choice in self.alternatives],
            "rejected": [asdict(rejected) for rejected in self.rejected],
            "knobs": [asdict(knob) for knob in self.knobs],
            "purchases": [asdict(purchase) for purchase in self.purchases],
            "fused_kernels": None if self.fused_kernels is None else asdict(self.fused_kernels),
            "packing": None if self.packing is None else asdict(self.packing),
            "binds": list(self.binds),
            "given_up": list(self.given_up),
            "searched": self.searched,
            "counts": asdict(self.counts),
            "proven": self.is_proven,
            "left_seconds": self.left_seconds,
            "interrupted": self.interrupted,
            "missing": {"device_bytes": self.missing_device_bytes, "host_bytes": self.missing_host_bytes},
            "smallest_gpu": self.smallest_gpu,
            "too_few_cards": list(self.too_few_gpus),
            "seconds": self.seconds,
        }


def typed(overrides: Mapping[str, Any]) -> tuple[str, ...]:
    """Return settings as they are typed."""
    return tuple(recipe_keys()[key].setting(value) for key, value in overrides.items())
