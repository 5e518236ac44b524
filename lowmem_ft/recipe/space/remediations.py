"""Changes with which a recipe needs less device memory, derived from the knobs and the rules, the cheapest first.

A change moves one memory knob to a leaner value, by the order of its ``search_values``, and brings along the fewest
settings that the rules ask for then. Its price is what the knobs' ``effects`` state. No technique is named here: one
that states its values and effects, and whose rules are written, is offered.
"""

from __future__ import annotations

import heapq
import itertools
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_ft.foundation.knob import COSTS, FIDELITIES, Effect
from lowmem_ft.optimizers.table import OPTIMIZERS
from lowmem_ft.recipe.plan_config import INCLUDED, Consent
from lowmem_ft.recipe.reading.keys import RecipeKey, recipe_keys
from lowmem_ft.recipe.rules.engine_rules import problems_with_engine
from lowmem_ft.recipe.space.search_space import (
    ROWS,
    Rule,
    nothing_left_to_recompute,
    recipe_rules,
    rule_of_one_micro_batch,
    with_settings,
)
from lowmem_ft.recipe.tree import Recipe

OFFERED: tuple[Consent, ...] = ("lora", "qlora", "shorter_rows")
"""Mathematics that a change may give up, the least missed first: another model or other data, as the user sees.

A rounding that loses small values is never offered.
"""

LONG_ROWS = 2048
"""Tokens per row from which tiling an MLP is worthwhile."""

MOST_SETTINGS = 8
"""The most settings of a change, with those that it brings along."""

Half = Literal["bf16", "fp16"]
"""The 16-bit type that a run can compute in."""

_DTYPES: dict[Half, str] = {"bf16": "bfloat16", "fp16": "float16"}

_OF_TRAINED_WEIGHTS = ("optimizer.", "offload.optimizer")
"""Keys that free next to nothing where adapters alone are trained."""

_FORMATS = ("model.dtype", "optimizer.master", "optimizer.state")
"""Keys that decide the bytes of a parameter at rest."""

_TAKEN_BACK = {
    "model.dtype": "bfloat16",
    "optimizer.master": "fp32",
    "training.mixed_precision": "no",
    "accumulation.fusion": False,
}
"""Values that a change may go back to, where another type asks for it: types, and what goes with one type alone."""

Settings = dict[str, Any]
"""New values by dotted key."""


@dataclass(frozen=True, kw_only=True)
class Remediation:
    """A change of settings that needs less memory, and its effect.

    Args:
        settings: new values by dotted key.
        why: the memory that it frees, or its cost, in a clause.
    """

    settings: Mapping[str, Any]
    why: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as a user types them."""
        return tuple(recipe_keys()[key].setting(value) for key, value in self.settings.items())

    @property
    def overrides_text(self) -> str:
        """The settings as a user types them, on one line."""
        return shlex.join(self.overrides)

    def applied_to(self, recipe: Recipe) -> Recipe:
        """Return the recipe with these settings."""
        return with_settings(recipe, self.settings)

    def is_exact_for(self, recipe: Recipe) -> bool:
        """Return whether a recipe trains the same numbers with this change, up to the order of sums."""
        return all(effect.fidelity == "exact" for effect in self._effects(recipe))

    def keeps_mathematics_of(self, recipe: Recipe) -> bool:
        """Return whether a recipe trains the same model by the same update with this change, up to rounding."""
        return self.price(recipe)[0] < len(COSTS)

    def price(self, recipe: Recipe) -> tuple[int, int]:
        """Return a sort key of the change's price: its cost, then its fidelity; other mathematics is most expensive."""
        effects = self._effects(recipe)
        if any(effect.fidelity == "other mathematics" for effect in effects):
            given_up = [OFFERED.index(effect.consent) for effect in effects if effect.consent]
            return len(COSTS), max(given_up, default=len(OFFERED))
        return (
            max(COSTS.index(effect.cost) for effect in effects),
            max(FIDELITIES.index(effect.fidelity) for effect in effects),
        )

    def _effects(self, recipe: Recipe) -> list[Effect]:
        return [recipe_keys()[path].effect_of_change(recipe, value) for path, value in self.settings.items()]


def remediations_for(
    recipe: Recipe, *, num_processes: int = 1, has_bfloat16: bool = True
) -> list[Remediation]:
    """Return changes that need less device memory, from no cost in time or fidelity to the most, as the knobs state it.

    Each includes the settings that it requires (``optimizer.in_backward`` may require checkpointing of every layer), so
    that it works both alone and after any of those before it; if a key has two values, the later counts.

    Args:
        recipe: the recipe; changes that it has already made are not suggested again.
        num_processes: processes that train together; some changes work only in one process.
        has_bfloat16: whether the device computes with bfloat16; without it, float16 and a loss scale take its place.

    Returns:
        The changes.
    """
    half: Half = "bf16" if has_bfloat16 and recipe.training.mixed_precision != "fp16" else "fp16"
    engine = recipe.distributed.plan(num_processes).engine
    rules = [*recipe_rules(), rule_of_one_micro_batch(recipe), *_advice(half)]
    if engine is not None:
        rules.append(Rule(keys=(), problems=lambda changed: list(problems_with_engine(changed, engine))))
    alone = _Completion(recipe, rules, half)
    ways = []
    for key, settings in _moves(recipe, half):
        completed = alone.completed(settings)
        if completed is not None and _is_leaner(key, completed, recipe):
            ways.append(Remediation(settings=completed, why=_why(key, settings[key.path])))
    for _ in range(2):  # what a change needs after others makes it dearer, and so decides its place
        ways.sort(key=lambda way: (way.price(recipe), len(way.settings)))
        ways = list(_works_after_others(recipe, ways, rules, half))
    return ways


def _works_after_others(
    recipe: Recipe, ways: Sequence[Remediation], rules: Sequence[Rule], half: Half
) -> Iterator[Remediation]:
    """Yield the changes, each with what it also needs after any or all of those before it."""
    changed, together = [recipe], recipe
    for way in ways:
        settings = way.settings
        for before in (*changed[1:], together, recipe):
            settings = _Completion(before, rules, half).completed(settings) or settings
        complete = Remediation(settings=settings, why=way.why)
        changed.append(complete.applied_to(recipe))
        together = complete.applied_to(together)
        yield complete


def _moves(recipe: Recipe, half: Half) -> Iterator[tuple[RecipeKey, Settings]]:
    """Yield each memory knob's leaner values."""
    is_trained = recipe.adapter.name == "none"
    for path, key in recipe_keys().items():
        if path == "model.dtype" if is_trained else path.startswith(_OF_TRAINED_WEIGHTS):
            continue  # the type of trained weights goes with their master
        if path == ROWS[0] and key.value_in(recipe) > 1:
            yield (
                key,
                {ROWS[0]: 1, ROWS[1]: key.value_in(recipe) * recipe.training.gradient_accumulation_steps},
            )
        for value in _leaner_values(key, recipe, half):
            yield key, {path: value}


def _leaner_values(key: RecipeKey, recipe: Recipe, half: Half) -> Iterator[Any]:
    """Yield the values of a knob that need less memory: at one price the leanest, of other data the nearest."""
    if key.effects is None:
        return
    own, at_price = key.value_in(recipe), dict[Effect, list[Any]]()
    for value in _after(key.search_values, own):
        effect = key.effect_of_change(recipe, value)
        has_effect = isinstance(key.effects, Effect) or value in key.effects
        if has_effect and effect.saves and effect.consent in ("", *OFFERED) and _may_be(value, half):
            at_price.setdefault(effect, []).append(value)
    for effect, values in at_price.items():
        is_nearest = effect.fidelity == "other mathematics" and own is not None
        yield values[0 if is_nearest else -1]


def _after(tries: Sequence[Any], own: Any) -> Sequence[Any]:
    """Return the values that need less than a recipe's own; a number that is not among them is compared with them.

    Of a mapping, which is not among them either, every value may need less: the bytes at rest decide.
    """
    if isinstance(own, Mapping):
        return tries
    if own in tries:
        return tries[tries.index(own) + 1 :]
    numbers = [value for value in tries if isinstance(value, int)]
    if isinstance(own, int) and numbers:
        rises = numbers[0] < numbers[-1]
        return [value for value in numbers if (value > own) == rises]
    return numbers if own is None else ()


def _may_be(value: Any, half: Half) -> bool:
    """Return whether a value is of the device's 16-bit type, or of none."""
    return value not in (("fp16", "float16") if half == "bf16" else ("bf16", "bfloat16"))


def _is_leaner(key: RecipeKey, settings: Settings, recipe: Recipe) -> bool:
    """Return whether a change of format needs fewer bytes a parameter; no other may change trained weights' type."""
    changed = with_settings(recipe, settings)
    if key.path in _FORMATS:
        return _bytes_of_a_parameter(changed) < _bytes_of_a_parameter(recipe)
    return "model.dtype" not in settings or changed.adapter.name != "none"


def _bytes_of_a_parameter(recipe: Recipe) -> float:
    """Return the bytes of a trained parameter with its gradient, state and master, or of a frozen one."""
    itemsize = 4 if recipe.model.dtype == "float32" else 2
    return itemsize if recipe.adapter.name != "none" else 2 * itemsize + recipe.optimizer.bytes_with(itemsize)


def _why(key: RecipeKey, value: Any) -> str:
    is_other = key.effect_of(value).fidelity == "other mathematics"
    return f"{key.frees}; costs: {key.costs}" if is_other else f"{key.frees}"


def _advice(half: Half) -> tuple[Rule, ...]:
    """Return rules that a user may break, and that a change keeps to."""

    def autocast(recipe: Recipe) -> Sequence[str]:
        is_trained = recipe.adapter.name == "none"
        is_idle = recipe.model.dtype != "float32" and recipe.training.mixed_precision == "bf16"
        return ["All weights are bfloat16 without autocast."] if is_trained and is_idle else []

    def adapters(recipe: Recipe) -> Sequence[str]:
        types = recipe.model.dtype, recipe.training.mixed_precision
        needs_types = recipe.adapter.name != "none" and types != (_DTYPES[half], half)
        return (
            ["Frozen weights take 16 bits, and their products with the adapters are computed in 16 bits."]
            if needs_types
            else []
        )

    def loss_scale(recipe: Recipe) -> Sequence[str]:
        types = recipe.model.dtype, recipe.training.mixed_precision
        return ["Gradients through float16 weights need a loss scale."] if types == ("float16", "no") else []

    def tiles(recipe: Recipe) -> Sequence[str]:
        is_short = recipe.data.max_length is not None and recipe.data.max_length < LONG_ROWS
        return ["Short rows gain little by tiles."] if is_short and recipe.tiling.mlp > 1 else []

    types = ("adapter.name", "model.dtype", "training.mixed_precision")
    return (
        *(Rule(keys=types, problems=rule) for rule in (autocast, adapters, loss_scale)),
        Rule(keys=("tiling.mlp",), problems=tiles),
        nothing_left_to_recompute,
    )


class _Completion:
    """Settings with what else the rules ask for; what a recipe breaks already stays as it is.

    Args:
        recipe: the recipe to change.
        rules: the rules to keep.
        half: the device's 16-bit type.
    """

    def __init__(self, recipe: Recipe, rules: Sequence[Rule], half: Half) -> None:
        self._recipe = recipe
        self._half: Half = half
        self._rules = [(rule, set(rule.problems(recipe))) for rule in rules]

    def completed(self, settings: Mapping[str, Any]) -> Settings | None:
        """Return settings with the fewest others that break no rule, the leanest of these first, or None.

        Args:
            settings: new values by dotted key, which stay.
        """
        number, seen = itertools.count(), list[Settings]()
        waiting: list[tuple[int, int, Settings]] = [(0, 0, dict(settings))]
        while waiting:
            *_, tried = heapq.heappop(waiting)
            broken = self._broken_by(tried)
            if broken is None:
                return tried
            for more in self._moves(broken, tried, _consents(self._recipe, settings)):
                further = {**more, **tried}
                if further not in seen and len(further) <= MOST_SETTINGS:
                    seen.append(further)
                    heapq.heappush(waiting, (len(further), next(number), further))
        return None

    def _broken_by(self, settings: Settings) -> Rule | None:
        changed = with_settings(self._recipe, settings)
        for rule, known in self._rules:
            is_read = not rule.keys or any(rule.reads(path) for path in settings)
            if is_read and not known.issuperset(rule.problems(changed)):
                return rule
        return None

    def _moves(self, rule: Rule, tried: Settings, consents: Collection[str]) -> Iterator[Settings]:
        """Yield settings of what a rule reads: leaner values, the leanest first, then types that are taken back.

        Where a rule reads a key that is no memory knob, such as clipping, the choice is the user's.
        """
        if any(path in recipe_keys() and recipe_keys()[path].effects is None for path in rule.keys):
            return
        for path, key in recipe_keys().items():
            if path in tried or not rule.reads(path):
                continue
            if path == "optimizer.name":
                yield from _stand_in(self._recipe)
            own = key.value_in(self._recipe)
            values = [*reversed(_after(key.search_values, own)), _TAKEN_BACK.get(path, own)]
            for value in values:
                consent = key.effect_of_change(self._recipe, value).consent
                if value != own and consent in ("", *consents) and _may_be(value, self._half):
                    yield {path: value}


def _consents(recipe: Recipe, settings: Mapping[str, Any]) -> set[str]:
    """Return what settings give up, with what that includes."""
    words = {recipe_keys()[path].effect_of_change(recipe, value).consent for path, value in settings.items()}
    return words | {INCLUDED[word] for word in words if word in INCLUDED}


def _stand_in(recipe: Recipe) -> Iterator[Settings]:
    """Yield the optimizer that has what the recipe's own lacks, with state and masters of about its size."""
    optimizer = recipe.optimizer
    if optimizer.row.stand_in is None:
        return
    settings: Settings = {"optimizer.name": optimizer.row.stand_in}
    if optimizer.row.state_bytes() < OPTIMIZERS[optimizer.row.stand_in].state_bytes():
        settings["optimizer.state"] = "8bit"
    if recipe.model.dtype == "bfloat16" and recipe.adapter.name == "none":
        settings["optimizer.master"] = "split16"
    yield settings
