"""Loading: from a recipe's name and ``key=value`` settings to a :class:`Recipe`, or to every problem at once."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from lowmem_ft.foundation.errors import RecipeError, raise_problems
from lowmem_ft.recipe.reading.another_model import Fitted, fitted_to_model
from lowmem_ft.recipe.reading.keys import (
    not_a_group,
    recipe_groups,
    recipe_keys,
    unknown_key,
)
from lowmem_ft.recipe.reading.overrides import parse_overrides
from lowmem_ft.recipe.reading.recipe_files import RecipeFile, read_recipe_files
from lowmem_ft.recipe.reading.references import recipe_key_of
from lowmem_ft.recipe.reading.replaced_sources import Replaced, replaced_by
from lowmem_ft.recipe.reading.typed_values import typed_sources, typed_value
from lowmem_ft.recipe.rules.conflicts import recipe_problems
from lowmem_ft.recipe.tree import Recipe

logger = logging.getLogger(__name__)


def load_recipe(name_or_path: str | os.PathLike[str] | None, overrides: Iterable[str] = ()) -> Recipe:
    """Return the recipe of that name, with the settings applied.

    A file may extend another (``base: NAME|PATH``); a key counts where it is set last: base, file, overrides. Keys that
    describe a data set or a model go with it: if a later layer names another one, they are dropped. Keys that go by the
    size of a model are made right for another one (:mod:`lowmem_ft.recipe.reading.another_model`).

    Args:
        name_or_path: the name of a shipped recipe, or the path of a ``.yaml`` file; None: the defaults alone.
        overrides: settings such as ``training.learning_rate=1e-5``; ``key=null`` unsets.

    Returns:
        The recipe, with every type, range and combination checked.

    Raises:
        RecipeError: if anything is wrong with the file or the settings; lists all problems.
    """
    draft = _Draft()
    files: list[RecipeFile] = []
    try:
        files = [] if name_or_path is None else read_recipe_files(name_or_path)
    except RecipeError as error:
        draft.problems += error.problems
        draft.wrong.update(recipe_groups())
    for file in files:
        draft.apply(_named(file, files[-1]), origin=f"{file.path}: ")
        draft.unresolved |= {key: f"{file.path}: {problem}" for key, problem in file.problems.items()}
    settings, malformed = parse_overrides(overrides)
    draft.problems += malformed
    draft.apply(settings)
    recipe = draft.finish()
    draft.log_changes()
    return recipe


def _named(file: RecipeFile, chosen: RecipeFile) -> dict[str, Any]:
    """Return the file's settings without a base's name and description, which do not apply to the chosen recipe."""
    if file is chosen:
        return {**file.settings, "name": file.settings.get("name") or file.path.stem}
    return {key: value for key, value in file.settings.items() if key not in ("name", "description")}


@dataclass
class _Draft:
    """A recipe in the making: typed values and problems so far, and the keys or groups not to be trusted.

    ``unresolved``: problems with references of files, by the key whose value holds them; a later layer may set it.
    """

    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    wrong: set[str] = field(default_factory=set)
    unresolved: dict[str, str] = field(default_factory=dict)
    replaced: list[Replaced] = field(default_factory=list)
    fitted: list[Fitted] = field(default_factory=list)

    def apply(self, settings: dict[str, Any], origin: str = "") -> None:
        """Apply one layer of settings; an unknown key or a wrong type becomes a problem that names its origin."""
        earlier, self.values = self.values, {}
        self._read(settings, origin)
        replaced = replaced_by(earlier, self.values)
        self.replaced += replaced
        dropped = {key for source in replaced for key in source.dropped}
        fitted = fitted_to_model(earlier, self.values)
        self.fitted += fitted
        kept = {key: earlier[key] for key in earlier if key not in dropped}
        self.values = {**kept, **{each.key: each.now for each in fitted}, **self.values}

    def log_changes(self) -> None:
        """Log what was dropped or changed with a data set or model that a later layer replaced."""
        for change in (*self.replaced, *self.fitted):
            logger.info("%s", change)

    def _read(self, settings: dict[str, Any], origin: str) -> None:
        for name, value in settings.items():
            if name not in recipe_groups():
                self._set(name, value, origin)
            elif isinstance(value, dict):
                for inner, inner_value in value.items():
                    self._set(f"{name}.{inner}", inner_value, origin)
            elif value is not None:  # a group whose keys are all commented out reads as null
                self.wrong.add(name)
                self.problems.append(f"{origin}{not_a_group(name, value)}")

    def _set(self, path: str, value: Any, origin: str) -> None:
        key = recipe_keys().get(path)
        if key is None:
            self.problems.append(f"{origin}{unknown_key(*_only_leaf(path, value))}")
            return
        self.unresolved = {key: why for key, why in self.unresolved.items() if recipe_key_of(key) != path}
        try:
            self.values[path] = typed_sources(value) if path == "data.sources" else typed_value(key, value)
        except RecipeError as error:
            self.wrong.add(path)
            self.problems += [f"{origin}{problem}" for problem in error.problems]

    def finish(self) -> Recipe:
        """Return the recipe; where a value could not be read, its default is used to check the rest."""
        groups = {name: group(**self._values_of(name, group)) for name, group in recipe_groups().items()}
        written = frozenset(path for path, value in self.values.items() if value is not None)
        fitted = {each.setting: str(each) for each in self.fitted}
        recipe = Recipe(**self._values_of(None, Recipe), **groups, written=written, fitted=fitted)
        unreliable = {*self.wrong, *map(recipe_key_of, self.unresolved)}
        problems = [*self.problems, *self.unresolved.values(), *recipe_problems(recipe, unreliable)]
        raise_problems(problems, RecipeError)
        return recipe

    def _values_of(self, group: str | None, config_class: type) -> dict[str, Any]:
        prefix = f"{group}." if group else ""
        names = (config_field.name for config_field in dataclasses.fields(config_class))
        return {name: self.values[prefix + name] for name in names if prefix + name in self.values}


def _only_leaf(path: str, value: Any) -> tuple[str, Any]:
    """Return ``trainig.seed`` and 1 for ``{trainig: {seed: 1}}``: the whole key where there is only one to name."""
    while isinstance(value, dict) and len(value) == 1:
        ((inner, value),) = value.items()
        path = f"{path}.{inner}"
    return path, value
