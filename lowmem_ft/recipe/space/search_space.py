"""The planner's search space, and why invalid combinations are excluded.

A dimension is a knob with its ``search_values`` and the recipe's own value. The rows of a micro-batch form one
dimension with the number of micro-batches, since the mathematics is their product, the rows of an optimizer step. A
combination takes one choice of each dimension. Each rule is evaluated once per distinct value of the keys it reads.

Of a number of last layers that are treated differently, a combination does not say how many: one choice stands for as
many as fit, whatever the other choices leave room for. That number is found when the combination is estimated
(``planning/planner/search/most_layers.py``), and all numbers share a trace.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.knob import COSTS, FIDELITIES, NO_EFFECT
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.plan_config import INCLUDED, PlanConfig
from lowmem_ft.recipe.reading.keys import RecipeKey, keys_with, memory_knobs, recipe_groups, recipe_keys
from lowmem_ft.recipe.rules.conflicts import CONFLICTS
from lowmem_ft.recipe.rules.engine_rules import problems_of_key, settings_work_with_the_strategy
from lowmem_ft.recipe.rules.rule import Rule, reads

ROWS = ("training.per_device_train_batch_size", "training.gradient_accumulation_steps")

Combination = tuple[int, ...]
"""The index of a choice for each dimension."""

Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dimension:
    """One choice to make.

    Args:
        choices: settings by dotted key, from the most memory to what should be the least.
        own: the index of the recipe's own.
        is_counted: whether the first choice stands for as many last layers as fit; it names the most, the last none.
    """

    choices: tuple[Settings, ...]
    own: int = 0
    is_counted: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that it sets."""
        return tuple(self.choices[0])


@dataclass(frozen=True, kw_only=True)
class Space:
    """All combinations that a recipe may become, and counts of those that rules exclude.

    Args:
        recipe: the starting point.
        dimensions: the choices to make.
        combinations: those that no rule excludes.
        refused: number of excluded ones, by the first message of the rule.
    """

    recipe: Recipe
    dimensions: tuple[Dimension, ...]
    combinations: tuple[Combination, ...]
    refused: Mapping[str, int]

    def settings(self, combination: Combination) -> dict[str, Any]:
        """Return all settings of a combination."""
        merged: dict[str, Any] = {}
        for dimension, index in zip(self.dimensions, combination, strict=True):
            merged |= dimension.choices[index]
        return merged

    def changes(self, combination: Combination) -> dict[str, Any]:
        """Return the settings that differ from the recipe's own."""
        return {
            key: value
            for key, value in self.settings(combination).items()
            if value != operator.attrgetter(key)(self.recipe)
        }

    def recipe_of(self, combination: Combination) -> Recipe:
        """Return the recipe with a combination's settings."""
        return with_settings(self.recipe, self.changes(combination))

    def counted(self, combination: Combination) -> tuple[str, ...]:
        """Return the keys of which a combination takes as many layers as fit."""
        pairs = zip(self.dimensions, combination, strict=True)
        return tuple(
            key for dimension, index in pairs if dimension.is_counted and not index for key in dimension.keys
        )

    @property
    def with_fewest_layers(self) -> Space:
        """The same combinations, each with the fewest layers where it takes as many as fit, and not with the most."""
        dimensions = tuple(
            dataclasses.replace(each, choices=(each.choices[-1], *each.choices[1:]))
            if each.is_counted
            else each
            for each in self.dimensions
        )
        return dataclasses.replace(self, dimensions=dimensions)

    @property
    def own(self) -> Combination:
        """The recipe as it is; what it leaves open takes the choice with the least memory."""
        return tuple(dimension.own for dimension in self.dimensions)

    def given_up(self, combination: Combination) -> tuple[int, ...]:
        """Return how much of each word in ``plan.allow`` a combination uses, the last and dearest first."""
        return _given_up(self.recipe, self.changes(combination))

    def price(self, place: int, index: int) -> tuple[int, int, int]:
        """Return the price of one choice of a dimension, for equal seconds: rounding, cost, and 1 if it is a change."""
        choice = self.dimensions[place].choices[index]
        effects = [recipe_keys()[key].effect_of_change(self.recipe, value) for key, value in choice.items()]
        return (
            max(FIDELITIES.index(effect.fidelity) for effect in effects),
            max(COSTS.index(effect.cost) for effect in effects),
            int(index != self.dimensions[place].own),
        )

    def complexity(self, combination: Combination) -> int:
        """Return how much a combination changes: each changed knob counts one, plus the rank of its cost."""
        prices = [self.price(place, index) for place, index in enumerate(combination)]
        return sum(is_changed * (1 + cost) for _, cost, is_changed in prices)

    def refusal(self, combination: Combination) -> str:
        """Return why a combination is excluded; empty if no rule refuses it."""
        recipe = self.recipe_of(combination)
        rules = (*_idle_rules(self.recipe), *recipe_rules())
        problems = [problem for rule in rules for problem in rule.problems(recipe)]
        return " ".join(problems)


def space_of(recipe: Recipe, *, num_layers: int, has_bfloat16: bool, rules: Sequence[Rule] = ()) -> Space:
    """Return what a recipe may become, by its own ``plan.allow`` and ``plan.keep``.

    Args:
        recipe: a valid one.
        num_layers: its model's number of layers.
        has_bfloat16: whether the device computes with bfloat16, so that float16 is not worth a try.
        rules: what the device and the model refuse, in addition to the recipe's own rules.

    Returns:
        The search space.
    """
    dimensions = tuple(_dimensions(recipe, num_layers=num_layers, has_bfloat16=has_bfloat16))
    return space_over(recipe, dimensions, [_consent_rule(recipe), *_idle_rules(recipe)], rules)


def space_over(
    recipe: Recipe, dimensions: tuple[Dimension, ...], first: Sequence[Rule] = (), then: Sequence[Rule] = ()
) -> Space:
    """Return the combinations of some dimensions that no rule excludes.

    Args:
        recipe: the starting point.
        dimensions: the choices to make.
        first: rules that are asked before the recipe's own.
        then: rules that are asked after them.
    """
    refused: Counter[str] = Counter()
    enumeration = _Enumeration(recipe, dimensions, [*first, *recipe_rules(), *then], refused)
    return Space(recipe=recipe, dimensions=dimensions, combinations=tuple(enumeration), refused=dict(refused))


def planned_keys(recipe: Recipe) -> list[RecipeKey]:
    """Return the keys that a plan chooses: the rows of a micro-batch, both or neither, and knobs with values to try.

    Of ``distributed`` only what a recipe of several processes leaves open: the rest says how the user will launch it.
    """
    plan, processes = recipe.plan, recipe.distributed.num_processes or 1

    def may_change(path: str) -> bool:
        group = path.partition(".")[0]
        if group == "distributed" and (processes == 1 or operator.attrgetter(path)(recipe) is not None):
            return False
        return path not in plan.keep and group not in plan.keep

    rows = ROWS if all(map(may_change, ROWS)) else ()
    return [
        key for path, key in recipe_keys().items() if path in rows or (key.search_values and may_change(path))
    ]


def with_settings(recipe: Recipe, settings: Settings) -> Recipe:
    """Return a recipe with new values by dotted key."""
    groups: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})[name] = value
    changed = {
        group: dataclasses.replace(getattr(recipe, group), **values) for group, values in groups.items()
    }
    return dataclasses.replace(recipe, **changed)


def recipe_rules() -> tuple[Rule, ...]:
    """Return the recipe's rules: of each group by itself, and across groups."""
    own = [
        Rule(keys=(group,), problems=lambda recipe, group=group: getattr(recipe, group).problems())
        for group, config in recipe_groups().items()
        if hasattr(config, "problems")
    ]
    return (
        *own,
        *(rule for rule in CONFLICTS if rule is not settings_work_with_the_strategy),
        *_engine_rules(),
    )


def _engine_rules() -> Iterator[Rule]:
    """Yield the rules of what works with a strategy, one per key: a single rule would run for every combination."""

    def rule_of(key: RecipeKey) -> Rule:
        @reads("distributed.strategy", key.path)
        def rule(recipe: Recipe) -> Iterator[str]:
            if (engine := recipe.distributed.named_engine) is not None:
                yield from problems_of_key(key, recipe, engine)

        return rule

    return (rule_of(key) for key in recipe_keys().values() if key.effects is not None)


def _dimensions(recipe: Recipe, *, num_layers: int, has_bfloat16: bool) -> Iterator[Dimension]:
    keys = planned_keys(recipe)
    if any(key.path in ROWS for key in keys):
        yield _rows(recipe)
    for key in keys:
        if key.search_values and key.counts_layers == "last":
            yield from _last_layers(key, recipe, num_layers - 1)
        elif key.search_values:
            values = _values(key, recipe, num_layers, has_bfloat16)
            if len(values) > 1:
                choices = tuple({key.path: value} for value in values)
                own = key.value_in(recipe)
                yield Dimension(
                    choices=choices, own=len(values) - 1 if _is_open(key, own) else values.index(own)
                )


def _rows(recipe: Recipe) -> Dimension:
    """Return all ways to split the rows of a step into equal micro-batches, the largest first."""
    own = tuple(operator.attrgetter(key)(recipe) for key in ROWS)
    rows = math.prod(own)
    ways = [(size, rows // size) for size in range(rows, 0, -1) if rows % size == 0]
    choices: list[Settings] = [{ROWS[0]: size, ROWS[1]: steps} for size, steps in ways]
    return Dimension(choices=tuple(choices), own=ways.index(own))


def _last_layers(key: RecipeKey, recipe: Recipe, most: int) -> Iterator[Dimension]:
    """Yield the choice between as many last layers as fit, the recipe's own number and none."""
    own = key.value_in(recipe)
    values = list(dict.fromkeys((most, own, 0))) if own < most else [most, 0]
    if most > 0:
        choices = tuple({key.path: value} for value in values)
        yield Dimension(choices=choices, own=values.index(min(own, most)), is_counted=True)


def _values(key: RecipeKey, recipe: Recipe, num_layers: int, has_bfloat16: bool) -> list[Any]:
    """Return the values to choose from, the recipe's own among them: first, if the knob does not name it."""
    own = key.value_in(recipe)
    values = [
        value
        for value in key.planned
        if value == own or _may_try(key, value, recipe, num_layers, has_bfloat16)
    ]
    return values if own in values or _is_open(key, own) else [own, *values]


def _is_open(key: RecipeKey, value: Any) -> bool:
    """Return whether the value leaves the choice to a plan and is not itself a choice; the last value then starts."""
    return (key.path, value) in (("checkpointing.mode", "auto"), ("distributed.strategy", None))


def _may_try(key: RecipeKey, value: Any, recipe: Recipe, num_layers: int, has_bfloat16: bool) -> bool:
    own, consent = key.value_in(recipe), key.effect_of_change(recipe, value).consent
    other_half = ("fp16", "float16") if has_bfloat16 else ("bf16", "bfloat16")
    if value in other_half or (key.counts_layers and value >= num_layers):
        return False
    if key.path == "adapter.name" and own != "none":
        return False  # a user who asked for adapters does not want the whole model trained
    if not consent:
        return True
    is_more = (
        isinstance(value, int) and isinstance(own, int) and value > own
    )  # what is given up only goes one way
    return consent in _granted(recipe.plan) and not is_more


def _granted(plan: PlanConfig) -> set[str]:
    return {*plan.allow, *(INCLUDED[word] for word in plan.allow if word in INCLUDED)}


def consent_keys() -> tuple[str, ...]:
    """Return the keys that have some value which needs the user's consent."""
    return tuple(path for path, key in recipe_keys().items() if asks_consent(key))


def words_of(recipe: Recipe, changed: Recipe) -> set[str]:
    """Return what a changed recipe gives up compared with the original, as words of ``plan.allow``."""
    values = {key: operator.attrgetter(key)(changed) for key in consent_keys()}
    return _words(recipe, {key: v for key, v in values.items() if v != operator.attrgetter(key)(recipe)})


def _words(recipe: Recipe, changes: Settings) -> set[str]:
    """Return the words that some changes give up, without those that another word includes."""
    effects = [recipe_keys()[key].effect_of_change(recipe, value) for key, value in changes.items()]
    words = {effect.consent for effect in effects if effect.consent}
    return words - {INCLUDED[word] for word in words if word in INCLUDED}


def _consent_rule(recipe: Recipe) -> Rule:
    """Return the rule that a word's included value needs the word's own value: lora only with qlora's."""

    @reads(*consent_keys())
    def rule(changed: Recipe) -> Iterator[str]:
        if missing := sorted(words_of(recipe, changed) - set(recipe.plan.allow)):
            yield f"plan.allow does not name {', '.join(missing)}."

    return rule


def _idle_rules(recipe: Recipe) -> tuple[Rule, ...]:
    """Return rules against values that gain nothing together with others: they would double the estimates."""

    @reads("model.dtype", "adapter.name", "training.mixed_precision")
    def autocast(changed: Recipe) -> Iterator[str]:
        own, value = recipe.training.mixed_precision, changed.training.mixed_precision
        has_other_weights = changed.adapter.name != "none"  # adapters are kept in float32
        is_alike = changed.model.dtype == "bfloat16" and not has_other_weights
        if is_alike and value != own and {value, own} == {"no", "bf16"}:
            yield "training.mixed_precision=bf16 gains nothing if all weights are bfloat16."

    @reads("distributed.reshard_after_forward", "distributed.cpu_offload")
    def gathered(changed: Recipe) -> Iterator[str]:
        config, is_open = changed.distributed, recipe.distributed.reshard_after_forward is None
        if is_open and not config.reshards and config.cpu_offload:
            yield (
                "distributed.reshard_after_forward=false keeps on the device what distributed.cpu_offload=true moves "
                "off it."
            )

    return gathered, autocast, nothing_left_to_recompute, rule_of_one_micro_batch(recipe)


@reads("checkpointing", "tiling.mlp")
def nothing_left_to_recompute(changed: Recipe) -> Iterator[str]:
    """Checkpoints of all layers and tiles compute activations again by themselves."""
    is_on = changed.checkpointing.mlp_activation != "keep"
    if is_on and (changed.checkpointing.checkpointed == "every layer" or changed.tiling.mlp > 1):
        yield "checkpointing.mlp_activation=recompute gains nothing where whole MLPs are computed again."


def rule_of_one_micro_batch(recipe: Recipe) -> Rule:
    """Return the rule that no value is new which does nothing where a step has a single micro-batch."""

    @reads(*keys_with("idle with one micro-batch"), ROWS[1])
    def rule(changed: Recipe) -> Iterator[str]:
        if changed.training.gradient_accumulation_steps > 1:
            return
        for key, value, effect in memory_knobs(changed):
            if "idle with one micro-batch" in effect.traits and value != key.value_in(recipe):
                yield f"{key.setting(value)} gains nothing with a single micro-batch."

    return rule


def asks_consent(key: RecipeKey) -> bool:
    """Return whether some value of a key needs the user's consent."""
    return any(effect.consent for effect in key.possible_effects)


def _given_up(recipe: Recipe, changes: Settings) -> tuple[int, ...]:
    """Return how much of each word in ``plan.allow`` is used, the last and dearest first."""
    words = _words(recipe, changes)
    used = dict.fromkeys(words, 1)
    for path, value in changes.items():
        key = recipe_keys()[path]
        effect = key.effect_of_change(recipe, value)
        if effect.consent in used and isinstance(value, int) and effect is not NO_EFFECT:
            used[effect.consent] = 1 + key.search_values.index(value)
    return tuple(used.get(word, 0) for word in reversed(recipe.plan.allow))


class _Enumeration:
    """All valid combinations in order; a rule runs as soon as all it reads is chosen, once per distinct choice."""

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
            return next(iter(rule.problems(with_settings(self._recipe, settings))), "")
        except UserError as error:
            return error.problems[0]
