"""Every key of a recipe as a user types it, its type and documentation, and suggestions for a wrong key."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import types
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lowmem_ft.data.source_keys import EXAMPLE
from lowmem_ft.foundation.knob import (
    FIDELITIES,
    NO_EFFECT,
    CountedLayers,
    Effect,
    Effects,
    RemainingBytes,
    Trait,
    as_typed,
)
from lowmem_ft.recipe.reading.foreign_keys import FOREIGN_KEYS, UNSAID, ForeignKey
from lowmem_ft.recipe.tree import Recipe

SHORT_FORMS = {
    "model": "model.name_or_path",
    "data": "data.path",
    "budget": "budget.device",
    "plan": "plan.mode",
}
"""The key that the name of a group stands for on the command line, as in ``budget=24GiB``."""


@dataclass(frozen=True, kw_only=True)
class RecipeKey:
    """One setting: its dotted ``path``, and the dataclass that holds it as field ``name``."""

    path: str
    config_class: type
    name: str
    type_hint: Any
    default: Any = field(hash=False)
    help: str
    frees: str | None
    costs: str | None
    effects: Effects | None = field(hash=False)
    off: Any
    counts_layers: CountedLayers
    search_values: tuple[Any, ...]
    planned: tuple[Any, ...]
    remaining_bytes: RemainingBytes | None = field(hash=False)
    is_kernel: bool

    @property
    def choices(self) -> tuple[str, ...]:
        """The values of a ``Literal``, which is the key's type or one of its types; empty without one."""
        return get_args(self._type_that_is(Literal)) or ()

    @property
    def takes_choices_by_name(self) -> bool:
        """True if the key takes one of its choices, or a mapping of names to them."""
        return bool(self.choices) and self._type_that_is(dict) is not None

    def _type_that_is(self, origin: Any) -> Any:
        hint = without_none(self.type_hint)
        members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        return next((member for member in members if get_origin(member) is origin), None)

    def value_in(self, recipe: Recipe) -> Any:
        """Return the key's value in a recipe."""
        return operator.attrgetter(self.path)(recipe)

    def is_set_in(self, recipe: Recipe) -> bool:
        """Return whether a recipe says a value: one that was written, if only the default, or another."""
        return self.path in recipe.written or self.value_in(recipe) != self.default

    def effect_of(self, value: Any) -> Effect:
        """Return the effect of a value; no effect for a key that is not a memory knob, or is switched off."""
        if isinstance(self.effects, Effect):
            return NO_EFFECT if value == self.off else self.effects
        return NO_EFFECT if self.effects is None else self.effects.get(value, NO_EFFECT)

    @property
    def possible_effects(self) -> tuple[Effect, ...]:
        """The effects of all values that have one."""
        if isinstance(self.effects, Effect):
            return (self.effects,)
        return tuple((self.effects or {}).values())

    def effect_of_change(self, recipe: Recipe, value: Any) -> Effect:
        """Return the effect of a new value: between optimizers with other mathematics, nothing more is given up."""
        before, after = self.effect_of(self.value_in(recipe)), self.effect_of(value)
        if value == self.value_in(recipe):
            return NO_EFFECT
        is_choice = not isinstance(self.effects, Effect)
        if is_choice and FIDELITIES.index(after.fidelity) <= FIDELITIES.index(before.fidelity):
            return dataclasses.replace(after, fidelity="exact")
        return after

    def setting(self, value: Any) -> str:
        """Return a value of the key as a user types it."""
        return f"{self.path}={as_typed(value)}"

    def setting_in(self, recipe: Recipe) -> str:
        """Return the key's value in a recipe as a user types it."""
        return self.setting(self.value_in(recipe))


@functools.cache
def recipe_groups() -> dict[str, type]:
    """Return the config class of each group, in the recipe's order."""
    hints = get_type_hints(Recipe)
    return {
        name: hint
        for name, hint in hints.items()
        if isinstance(hint, type) and dataclasses.is_dataclass(hint)
    }


@functools.cache
def recipe_keys() -> dict[str, RecipeKey]:
    """Return every key by its dotted path, in the recipe's order."""
    keys: dict[str, RecipeKey] = {}
    for name in (knob.name for knob in dataclasses.fields(Recipe) if knob.compare):
        group = recipe_groups().get(name)
        found = _keys_of(group, prefix=f"{name}.") if group else _keys_of(Recipe, only=name)
        keys.update((key.path, key) for key in found)
    return keys


def _keys_of(config_class: type, prefix: str = "", only: str | None = None) -> Iterator[RecipeKey]:
    hints = get_type_hints(config_class)
    for knob in dataclasses.fields(config_class):
        if only is None or knob.name == only:
            yield RecipeKey(
                path=prefix + knob.name,
                config_class=config_class,
                name=knob.name,
                type_hint=hints[knob.name],
                default=knob.default if knob.default_factory is MISSING else knob.default_factory(),
                **knob.metadata,
            )


def memory_knobs(recipe: Recipe) -> Iterator[tuple[RecipeKey, Any, Effect]]:
    """Yield each memory knob of a recipe with its value and the effect of that."""
    for key in recipe_keys().values():
        if key.effects is not None:
            value = key.value_in(recipe)
            yield key, value, key.effect_of(value)


def keys_whose_effect(test: Callable[[Effect], Any]) -> tuple[str, ...]:
    """Return the keys that have some value with an effect of a kind."""
    return tuple(path for path, key in recipe_keys().items() if any(map(test, key.possible_effects)))


def key_with(recipe: Recipe, trait: Trait) -> RecipeKey | None:
    """Return the key whose value in a recipe has a trait; None if no value has it."""
    return next((key for key, _, effect in memory_knobs(recipe) if trait in effect.traits), None)


def keys_with(trait: Trait) -> tuple[str, ...]:
    """Return the keys that have some value with a trait."""
    return keys_whose_effect(lambda effect: trait in effect.traits)


def unknown_key(path: str, value: Any = UNSAID) -> str:
    """Return the sentence about a key that does not exist: what was seen, and what was probably meant."""
    if (foreign := _foreign(path, value)) is not None:
        return foreign.answer(path, value)
    meant = _closest(path)
    if not meant:
        return f"{path} is not a recipe key. Run `lowmem-ft recipes NAME` to see every key."
    return f"{path} is not a recipe key. Did you mean {' or '.join(f'`{key}`' for key in meant)}?"


def not_a_group(group: str, value: Any) -> str:
    """Return the sentence about a plain value where a group of settings belongs."""
    short = SHORT_FORMS.get(group)
    if short is not None:
        return f"{group} is a group of settings, got {value!r}. Write {short}={value}."
    keys = {path: key for path, key in recipe_keys().items() if path.startswith(f"{group}.")}
    meant = [path for path, key in keys.items() if value in key.choices]
    if len(meant) == 1:
        return f"{group} is a group of settings, got {value!r}. Did you mean `{meant[0]}={value}`?"
    if (foreign := FOREIGN_KEYS.get(group)) is not None and foreign.knows(value):
        return foreign.answer(group, value)
    names = ", ".join(path.removeprefix(f"{group}.") for path in keys)
    return f"{group} is a group of settings, got {value!r}. Write {group}.KEY={value} with one of its keys: {names}."


def keys_meant_by(path: str) -> list[str]:
    """Return the keys that a wrong one may mean: another toolkit's, a name in the wrong group, a misspelt one."""
    foreign = _foreign(path)
    if foreign is None:
        return _closest(path)
    return [foreign.ours] if foreign.ours else []


def _foreign(path: str, value: Any = UNSAID) -> ForeignKey | None:
    """Return another toolkit's key; a name that is ours in another group is theirs only with a value of theirs."""
    *parents, leaf = path.split(".")
    names = [leaf, *(parent for parent in parents if parent not in recipe_groups())]
    found = next(filter(None, map(FOREIGN_KEYS.get, names)), None)
    is_ours = found is not None and any(key.name == found.name for key in recipe_keys().values())
    return None if found is not None and is_ours and not found.knows(value) else found


def _closest(path: str) -> list[str]:
    """Return known keys or groups whose whole path or last part is spelt like the one seen, closest first."""
    leaf = path.rpartition(".")[2]

    def likeness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, path, known).ratio()
        last = difflib.SequenceMatcher(None, leaf, known.rpartition(".")[2]).ratio()
        return max(whole, last)

    ranked = sorted([*recipe_groups(), *recipe_keys()], key=likeness, reverse=True)
    best = likeness(ranked[0])
    return [known for known in ranked[:2] if likeness(known) >= max(0.75, best - 0.05)]


def without_none(type_hint: Any) -> Any:
    """Return ``X`` for ``X | None``; any other type unchanged."""
    if not accepts_none(type_hint):
        return type_hint
    rest = tuple(member for member in get_args(type_hint) if member is not types.NoneType)
    return rest[0] if len(rest) == 1 else Union[rest]  # noqa: UP007  (built from a tuple)


def accepts_none(type_hint: Any) -> bool:
    """Return whether null is among the values of the type."""
    return get_origin(type_hint) in (Union, types.UnionType) and types.NoneType in get_args(type_hint)


def describe_type(type_hint: Any) -> str:
    """Describe a value of the type, in words that complete "must be"."""
    if accepts_none(type_hint):
        return f"{describe_type(without_none(type_hint))}, or null"
    origin, arguments = get_origin(type_hint), get_args(type_hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(describe_type(member) for member in arguments)
    if origin is list and get_origin(arguments[0]) is dict:
        return f"a list of mappings such as {EXAMPLE}"
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return f"a list such as [{_example(arguments[0])}], each {describe_type(arguments[0])}"
    if origin is tuple:
        return f"a list of {len(arguments)}, such as [{', '.join(map(_example, arguments))}]"
    if origin is dict:
        is_choice = get_origin(arguments[1]) is Literal
        return f"a mapping such as {{key: {_example(arguments[1]) if is_choice else 'value'}}}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[type_hint]


def _example(type_hint: Any) -> str:
    if get_origin(type_hint) is Literal:
        return get_args(type_hint)[0]
    return {bool: "true", int: "1", float: "0.9", str: "a"}[type_hint]
