"""Values of a recipe in the types of their keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowmem_ft.data.source_keys import EXAMPLE, OF_A_SOURCE, SHARES
from lowmem_ft.foundation.errors import RecipeError, did_you_mean, raise_problems
from lowmem_ft.recipe.reading.keys import RecipeKey, describe_type, recipe_keys, without_none
from lowmem_ft.recipe.reading.references import escape_references


def typed_value(key: RecipeKey, value: Any) -> Any:
    """Return a value in the type of its key.

    Raises:
        RecipeError: if it is of another type.
    """
    try:
        return (_typed if isinstance(value, (list, tuple, dict)) else _typed_scalar)(key, value)
    except (
        OmegaConfBaseException,
        TypeError,
    ) as error:  # TypeError: a list where a mapping belongs, or the reverse
        raise RecipeError(_wrong_type(key, value)) from error


def typed_sources(value: Any) -> list[dict[str, Any]] | None:
    """Return the mappings of ``data.sources``, each value in the type that the key has in ``data``.

    Raises:
        RecipeError: if it is no list of mappings, or one has a wrong key or value; lists all problems.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not all(isinstance(source, dict) for source in value):
        raise RecipeError(
            f"data.sources must be a list of mappings such as {EXAMPLE}, or null; got {value!r}."
        )
    problems: list[str] = []
    sources = []
    for index, source in enumerate(value):
        typed = {}
        for name, inner in source.items():
            try:
                typed[name] = _typed_of_source(f"data.sources[{index}]", str(name), inner)
            except RecipeError as error:
                problems += error.problems
        sources.append({name: inner for name, inner in typed.items() if inner is not None})
    raise_problems(problems, RecipeError)
    return sources


def _typed_of_source(source: str, name: str, value: Any) -> Any:
    path = f"{source}.{name}"
    if name in SHARES:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        is_right = is_number and (name == "weight" or isinstance(value, int))
        if value is not None and not is_right:
            what = "a number" if name == "weight" else "a whole number"
            raise RecipeError(f"{path} must be {what}, or null; got {value!r}.")
        return value
    if name not in OF_A_SOURCE:
        of_data = f"data.{name}" in recipe_keys()
        hint = f" Set data.{name}, which holds for all sources." if of_data else ""
        hint = (
            hint
            or did_you_mean(name, (*OF_A_SOURCE, *SHARES))
            or f" Keys: {', '.join((*OF_A_SOURCE, *SHARES))}."
        )
        raise RecipeError(f"{path} is not a key of a source.{hint}")
    return typed_value(dataclasses.replace(recipe_keys()[f"data.{name}"], path=path), value)


def _typed(key: RecipeKey, value: Any) -> Any:
    """Return the value in the key's own type, as OmegaConf converts it.

    Raises:
        OmegaConfBaseException: if the value is not of that type.
        TypeError: if it is a list where a mapping belongs, or the reverse.
    """
    if key.choices and isinstance(value, bool):
        # YAML 1.1 reads a bare `no` as false: `mixed_precision: no` means the choice of that name.
        value = {True: "yes", False: "no"}[value]
    if _lost_text(key, value):
        raise OmegaConfBaseException(f"{key.path} is text")
    if _lost_value(value):
        raise OmegaConfBaseException(f"{key.path} has a name without a value")
    if key.takes_choices_by_name and isinstance(value, dict):
        if all(isinstance(name, str) and chosen in key.choices for name, chosen in value.items()):
            return value
        raise OmegaConfBaseException(f"{key.path} maps names to {', '.join(key.choices)}")
    config = OmegaConf.merge(_schema(key), {key.name: escape_references(value)})
    assert isinstance(config, DictConfig)
    converted = config[key.name]
    return OmegaConf.to_object(converted) if OmegaConf.is_config(converted) else converted


def _lost_text(key: RecipeKey, value: Any) -> bool:
    """Return whether YAML took text for something else: `run_name: on`, `revision: 1e5`, `add_tokens: [yes]`."""
    hint = without_none(key.type_hint)
    entries = value if isinstance(value, (list, tuple)) and str in get_args(hint) else [value]
    return (hint is str or entries is value) and any(isinstance(entry, (bool, float)) for entry in entries)


def _lost_value(value: Any) -> str | None:
    """Return the name that YAML made of a name and its value, if any: ``{exp_avg:bf16}``, with no space between."""
    names = value.items() if isinstance(value, dict) else ()
    return next((name for name, of in names if of is None and isinstance(name, str) and ":" in name), None)


_typed_scalar: Callable[[RecipeKey, Any], Any] = functools.lru_cache(maxsize=4096, typed=True)(_typed)
"""OmegaConf takes most of the time of a load, and whoever compares recipes loads the same values over and over."""


@functools.cache
def _schema(key: RecipeKey) -> DictConfig:
    """Return a schema with only the key's field: OmegaConf takes milliseconds per field, and a file sets many keys."""
    (field,) = (field for field in dataclasses.fields(key.config_class) if field.name == key.name)
    default = dataclasses.field(default=field.default, default_factory=field.default_factory)
    # OmegaConf has no unions with a mapping, which is read without it.
    hint = Literal[key.choices] if key.takes_choices_by_name else key.type_hint
    return OmegaConf.structured(dataclasses.make_dataclass("Setting", [(key.name, hint, default)]))


def _wrong_type(key: RecipeKey, value: Any) -> str:
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
    hint = did_you_mean(str(value), key.choices)
    if _lost_text(key, value):
        hint = " Put it in quotes: YAML reads it as another type."
    if name := _lost_value(value):
        hint = f" Put a space after the colon: {name.replace(':', ': ', 1)}."
    return f"{key.path} must be {describe_type(key.type_hint)}; got {shown}.{hint}"
