"""The combinations of settings that a plan may choose from, and why others are none.

A dimension is a knob with the values that its ``tries`` name, beside the recipe's own. The rows of a micro-batch are
one dimension with the number of micro-batches, since their product, the rows of an optimizer step, is the mathematics.
A combination takes one choice of each dimension. Rules are asked about the keys that they read, each once.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.knob import COSTS, FIDELITIES, NO_EFFECT, Effect
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.plan_config import INCLUDED, PlanConfig
from lowmem_ft.recipe.reading.keys import RecipeKey, recipe_groups, recipe_keys
from lowmem_ft.recipe.rules.conflicts import CONFLICTS
from lowmem_ft.recipe.rules.engine_rules import problems_of_key, settings_work_with_the_strategy
from lowmem_ft.training.out_of_memory.remediations import Remediation

ROWS = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")

Combination = tuple[int, ...]
"""The index of a choice for each dimension."""

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Something that combinations are refused by.

    Args:
        keys: all that it reads of what a plan may change; a group's name stands for its keys.
        problems: what it says of a recipe; empty if nothing.
    """

    keys: tuple[str, ...]
    problems: Callable[[Recipe], Sequence[str]]

    def reads(self, key: str) -> bool:
        """Whether its answer may change with a key."""
        return key in self.keys or key.partition(".")[0] in self.keys


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One thing to choose.

    Args:
        choices: settings by dotted key, from what needs most memory to what is meant to need least.
        own: the index of the recipe's.
    """

    choices: tuple[Settings, ...]
    own: int = 0

    @property
    def keys(self) -> tuple[str, ...]:
        """What it sets."""
        return tuple(self.choices[0])


@dataclass(frozen=True, kw_only=True)
class Space:
    """All combinations that a recipe may become, and those that rules refuse.

    Args:
        recipe: where it starts.
        dimensions: what there is to choose.
        combinations: those that no rule refuses.
        refused: how many a rule refuses, by what it says of the first of them.
    """

    recipe: Recipe
    dimensions: tuple[Dimension, ...]
    combinations: tuple[Combination, ...]
    refused: Mapping[str, int]

    def settings(self, combination: Combination) -> dict[str, Any]:
        """All that a combination sets."""
        merged: dict[str, Any] = {}
        for dimension, index in zip(self.dimensions, combination, strict=True):
            merged |= dimension.choices[index]
        return merged

    def changes(self, combination: Combination) -> dict[str, Any]:
        """What of it the recipe does not say already."""
        return {
            key: value
            for key, value in self.settings(combination).items()
            if value != operator.attrgetter(key)(self.recipe)
        }

    def recipe_of(self, combination: Combination) -> Recipe:
        """The recipe with a combination's settings."""
        return with_settings(self.recipe, self.changes(combination))

    @property
    def own(self) -> Combination:
        """The recipe as it is; where it leaves something open, with what needs least memory."""
        return tuple(dimension.own for dimension in self.dimensions)

    def given_up(self, combination: Combination) -> tuple[int, ...]:
        """How much of each word in ``plan.allow`` a combination uses, the last and dearest first."""
        return _given_up(self.recipe, self.changes(combination))

    def price(self, place: int, index: int) -> tuple[int, int, int]:
        """What one choice of a dimension costs, where seconds are equal: rounding, what is paid, a change."""
        choice = self.dimensions[place].choices[index]
        effects = [recipe_keys()[key].effect_of_change(self.recipe, value) for key, value in choice.items()]
        return (
            max(FIDELITIES.index(effect.fidelity) for effect in effects),
            max(COSTS.index(effect.cost) for effect in effects),
            int(index != self.dimensions[place].own),
        )

    def complexity(self, combination: Combination) -> int:
        """How much a combination changes: each knob counts one, and as many more as what it costs is dear."""
        prices = [self.price(place, index) for place, index in enumerate(combination)]
        return sum(is_changed * (1 + cost) for _, cost, is_changed in prices)

    def refusal(self, combination: Combination) -> str:
        """Why a combination is none; empty if no rule refuses it."""
        recipe = self.recipe_of(combination)
        rules = (*_idle_rules(self.recipe), *recipe_rules())
        problems = [problem for rule in rules for problem in rule.problems(recipe)]
        return " ".join(problems)


def space_of(recipe: Recipe, *, num_layers: int, has_bfloat16: bool, rules: Sequence[Rule] = ()) -> Space:
    """What a recipe may become, by its own ``plan.allow`` and ``plan.keep``.

    Args:
        recipe: a valid one.
        num_layers: of its model.
        has_bfloat16: whether the device computes with bfloat16, so that float16 is not worth a try.
        rules: what the device and the model refuse, beside the recipe's own rules.

    Returns:
        The space.
    """
    dimensions = tuple(_dimensions(recipe, num_layers=num_layers, has_bfloat16=has_bfloat16))
    refused: Counter[str] = Counter()
    own = [_consent_rule(recipe), *_idle_rules(recipe)]
    enumeration = _Enumeration(recipe, dimensions, [*own, *recipe_rules(), *rules], refused)
    return Space(recipe=recipe, dimensions=dimensions, combinations=tuple(enumeration), refused=dict(refused))


def planned_keys(recipe: Recipe) -> list[RecipeKey]:
    """What a plan chooses: the rows of a micro-batch, together or not at all, and all knobs with values to try.

    Of ``distributed`` what a recipe of several processes leaves open: the rest is how it will be launched.
    """
    plan, processes = recipe.plan, recipe.distributed.num_processes or 1

    def may_change(path: str) -> bool:
        group = path.partition(".")[0]
        if group == "distributed" and (processes == 1 or operator.attrgetter(path)(recipe) is not None):
            return False
        return path not in plan.keep and group not in plan.keep

    rows = ROWS if all(map(may_change, ROWS)) else ()
    return [key for path, key in recipe_keys().items() if path in rows or (key.tries and may_change(path))]


def with_settings(recipe: Recipe, settings: Settings) -> Recipe:
    """A recipe with new values by dotted key."""
    return Remediation(settings=settings, why="").applied_to(recipe)


def recipe_rules() -> tuple[Rule, ...]:
    """Those of the recipe: of each group by itself, and across groups."""
    own = [
        Rule(keys=(group,), problems=lambda recipe, group=group: getattr(recipe, group).problems())
        for group, config in recipe_groups().items()
        if hasattr(config, "problems")
    ]
    across = (rule for rule in CONFLICTS if rule is not settings_work_with_the_strategy)
    return (*own, *(Rule(keys=rule.keys, problems=rule.problems) for rule in across), *_engine_rules())


def _engine_rules() -> Iterator[Rule]:
    """What works with a strategy, key by key: one rule for all would be asked of every combination."""

    def rule_of(key: RecipeKey) -> Rule:
        def problems(recipe: Recipe) -> Sequence[str]:
            strategy = recipe.distributed.strategy
            return [] if strategy in (None, "none") else list(problems_of_key(key, recipe, strategy))

        return Rule(keys=("distributed.strategy", key.path), problems=problems)

    return (rule_of(key) for key in recipe_keys().values() if key.effects is not None)


def _dimensions(recipe: Recipe, *, num_layers: int, has_bfloat16: bool) -> Iterator[Dimension]:
    keys = planned_keys(recipe)
    if any(key.path in ROWS for key in keys):
        yield _rows(recipe)
    for key in keys:
        if key.tries:
            values = _values(key, recipe, num_layers, has_bfloat16)
            if len(values) > 1:
                choices = tuple({key.path: value} for value in values)
                own = key.value_in(recipe)
                yield Dimension(
                    choices=choices, own=len(values) - 1 if _is_open(key, own) else values.index(own)
                )


def _rows(recipe: Recipe) -> Dimension:
    """All ways to cut the rows of a step into equal micro-batches, the largest first."""
    own = tuple(operator.attrgetter(key)(recipe) for key in ROWS)
    rows = math.prod(own)
    ways = [(size, rows // size) for size in range(rows, 0, -1) if rows % size == 0]
    choices: list[Settings] = [{ROWS[0]: size, ROWS[1]: steps} for size, steps in ways]
    return Dimension(choices=tuple(choices), own=ways.index(own))


def _values(key: RecipeKey, recipe: Recipe, num_layers: int, has_bfloat16: bool) -> list[Any]:
    """The values to choose from, the recipe's own among them: first, where the knob does not name it."""
    own = key.value_in(recipe)
    values = [
        value for value in key.tries if value == own or _may_try(key, value, recipe, num_layers, has_bfloat16)
    ]
    return values if own in values or _is_open(key, own) else [own, *values]


def _is_open(key: RecipeKey, value: Any) -> bool:
    """Whether the value leaves the choice to a plan, and so is none to choose; the last one then starts the search."""
    return (key.path, value) in (("checkpointing.mode", "auto"), ("distributed.strategy", None))


def _may_try(key: RecipeKey, value: Any, recipe: Recipe, num_layers: int, has_bfloat16: bool) -> bool:
    own, consent = key.value_in(recipe), key.effect_of_change(recipe, value).consent
    other_half = ("fp16", "float16") if has_bfloat16 else ("bf16", "bfloat16")
    if value in other_half or (key.counts_layers and value >= num_layers):
        return False
    if key.path == "adapter.name" and own != "none":
        return False  # whoever asked for adapters does not want the whole model trained
    if not consent:
        return True
    is_more = isinstance(value, int) and isinstance(own, int) and value > own  # what is given up goes one way
    return consent in _granted(recipe.plan) and not is_more


def _granted(plan: PlanConfig) -> set[str]:
    return {*plan.allow, *(INCLUDED[word] for word in plan.allow if word in INCLUDED)}


def consent_keys() -> tuple[str, ...]:
    """The keys of which some value has to be allowed."""
    return tuple(path for path, key in recipe_keys().items() if asks_consent(key))


def words_of(recipe: Recipe, changed: Recipe) -> set[str]:
    """What a changed recipe gives up against the one it was, by the words of ``plan.allow``."""
    values = {key: operator.attrgetter(key)(changed) for key in consent_keys()}
    return _words(recipe, {key: v for key, v in values.items() if v != operator.attrgetter(key)(recipe)})


def _words(recipe: Recipe, changes: Settings) -> set[str]:
    """What some changes give up, without what goes along with something else."""
    effects = [recipe_keys()[key].effect_of_change(recipe, value) for key, value in changes.items()]
    words = {effect.consent for effect in effects if effect.consent}
    return words - {INCLUDED[word] for word in words if word in INCLUDED}


def _consent_rule(recipe: Recipe) -> Rule:
    """A value that goes along with a word may be chosen with that word's own value alone: lora with qlora's."""

    def problems(changed: Recipe) -> Sequence[str]:
        missing = sorted(words_of(recipe, changed) - set(recipe.plan.allow))
        return [f"plan.allow does not name {', '.join(missing)}."] if missing else []

    return Rule(keys=consent_keys(), problems=problems)


def _idle_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Values that gain nothing beside certain others: trying them would take twice the estimates."""

    def autocast(changed: Recipe) -> Sequence[str]:
        own, value = recipe.training.mixed_precision, changed.training.mixed_precision
        has_other_weights = changed.adapter.name != "none"  # adapters are kept in float32
        is_alike = changed.model.dtype == "bfloat16" and not has_other_weights
        is_idle = is_alike and value != own and {value, own} == {"no", "bf16"}
        return (
            ["training.mixed_precision=bf16 gains nothing where all weights are bfloat16."] if is_idle else []
        )

    def order(changed: Recipe) -> Sequence[str]:
        own, value = recipe.accumulation.order, changed.accumulation.order
        is_idle = changed.training.gradient_accumulation_steps == 1 and (own, value) == (
            "horizontal",
            "vertical",
        )
        return ["accumulation.order=vertical gains nothing with a single micro-batch."] if is_idle else []

    def gathered(changed: Recipe) -> Sequence[str]:
        config = changed.distributed
        is_idle = (
            recipe.distributed.reshard_after_forward is None and not config.reshards and config.cpu_offload
        )
        return (
            [
                "distributed.reshard_after_forward=false leaves there what distributed.cpu_offload=true takes off."
            ]
            if is_idle
            else []
        )

    return (
        Rule(
            keys=("distributed.reshard_after_forward", "distributed.cpu_offload"),
            problems=gathered,
        ),
        Rule(keys=("model.dtype", "adapter.name", "training.mixed_precision"), problems=autocast),
        Rule(keys=("accumulation.order", ROWS[1]), problems=order),
    )


def asks_consent(key: RecipeKey) -> bool:
    """Whether some value of a key has to be allowed."""
    if isinstance(key.effects, Effect):
        return bool(key.effects.consent)
    return any(effect.consent for effect in (key.effects or {}).values())


def _given_up(recipe: Recipe, changes: Settings) -> tuple[int, ...]:
    """How much of each word in ``plan.allow`` is used, the last and dearest first."""
    words = _words(recipe, changes)
    used = dict.fromkeys(words, 1)
    for path, value in changes.items():
        key = recipe_keys()[path]
        effect = key.effect_of_change(recipe, value)
        if effect.consent in used and isinstance(value, int) and effect is not NO_EFFECT:
            used[effect.consent] = 1 + key.tries.index(value)
    return tuple(used.get(word, 0) for word in reversed(recipe.plan.allow))


class _Enumeration:
    """All valid combinations in order; a rule is asked once all it reads is chosen, and once for each such choice."""

    def __init__(
        self, recipe: Recipe, dimensions: Sequence[Dimension], rules: Sequence[Rule], refused: Counter[str]
    ) -> None:
        self._recipe = recipe
        self._dimensions = dimensions
        self._refused = refused
        self._rules: list[list[tuple[Rule, tuple[int, ...], dict[Any, str]]]] = [[] for _ in dimensions]
        self._below = [1] * (len(dimensions) + 1)
        for place in range(len(dimensions) - 1, -1, -1):
            self._below[place] = self._below[place + 1] * len(dimensions[place].choices)
        for rule in rules:
            places = tuple(
                place
                for place, dimension in enumerate(dimensions)
                if any(rule.reads(key) for key in dimension.keys)
            )
            if places:
                self._rules[places[-1]].append((rule, places, {}))

    def __iter__(self) -> Iterator[Combination]:
        yield from self._from(())

    def _from(self, chosen: Combination) -> Iterator[Combination]:
        if chosen:
            reason = self._refusal(chosen)
            if reason:
                self._refused[reason] += self._below[len(chosen)]
                return
        if len(chosen) == len(self._dimensions):
            yield chosen
            return
        for index in range(len(self._dimensions[len(chosen)].choices)):
            yield from self._from((*chosen, index))

    def _refusal(self, chosen: Combination) -> str:
        for rule, places, answers in self._rules[len(chosen) - 1]:
            read = tuple(chosen[place] for place in places)
            if read not in answers:
                answers[read] = self._answer(rule, places, read)
            if answers[read]:
                return answers[read]
        return ""

    def _answer(self, rule: Rule, places: tuple[int, ...], read: tuple[int, ...]) -> str:
        settings: dict[str, Any] = {}
        for place, index in zip(places, read, strict=True):
            settings |= self._dimensions[place].choices[index]
        try:
            problems = rule.problems(with_settings(self._recipe, settings))
        except UserError as error:
            problems = error.problems
        return problems[0] if problems else ""
