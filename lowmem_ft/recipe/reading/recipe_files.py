"""Recipe files: where they are, what they say, and the files they extend."""

from __future__ import annotations

import copy
import functools
import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lowmem_ft.foundation.catalog.model_architectures import find_architecture
from lowmem_ft.foundation.errors import RecipeError, did_you_mean
from lowmem_ft.foundation.user_paths import address_problem, expand_user, neighbours, recipes_folder
from lowmem_ft.recipe.reading.ambiguous_numbers import ambiguity, ambiguous_numbers
from lowmem_ft.recipe.reading.references import TooLongError, resolve_references

MOST_NAMED = 5
"""The most files of a folder that an error names."""


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """The settings of one YAML file, as nested plain values; ``path`` is the file.

    ``problems``: what is wrong with a reference, by the key whose value holds it and which ``settings`` lacks.
    """

    path: Path
    settings: dict[str, Any]
    problems: dict[str, str]


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(recipes_folder().glob("*.yaml"))}


def read_recipe_files(name_or_path: str | os.PathLike[str]) -> list[RecipeFile]:
    """Return the named recipe's file and, before it, the files it extends: later ones override earlier ones.

    Args:
        name_or_path: the name of a shipped recipe, or the path of a ``.yaml`` file.

    Returns:
        The files, the named one last.

    Raises:
        RecipeError: if a file is missing, is not YAML, is not a mapping, or extends itself.
    """
    files: list[RecipeFile] = []
    wanted: str | None = os.fspath(name_or_path)
    folder = Path()
    while wanted is not None:
        try:
            path = _find(wanted, folder)
        except RecipeError as error:
            raise RecipeError(*(f"{_base_of(files)}{problem}" for problem in error.problems)) from error
        if any(path.samefile(file.path) for file in files):
            chain = " -> ".join(str(file.path) for file in files)
            raise RecipeError(
                f"A recipe cannot extend itself, got base: {chain} -> {path}. Remove one of the bases."
            )
        file = _read(path)
        wanted, folder = _pop_base(file), path.parent
        files.insert(0, file)
    return files


def _base_of(files: list[RecipeFile]) -> str:
    return f"{files[0].path}: base: " if files else ""


def _find(name_or_path: str, folder: Path) -> Path:
    """Return the file of a shipped recipe, or of a path relative to ``folder``."""
    shipped = shipped_recipes()
    if name_or_path in shipped:
        return shipped[name_or_path]
    if address_problem("recipe", name_or_path):
        raise RecipeError(
            f"A recipe is shipped or a file on this machine, got the address {name_or_path}. Download it, read it, "
            "and name the file."
        )
    path = folder / expand_user(name_or_path)
    if path.is_file():
        return path
    if path.is_dir():
        raise RecipeError(
            f"A recipe is one .yaml file, got the folder {path.resolve() if path.name == '' else path}. Recipes in it: "
            f"{_yaml_names(path)}. {_SHIPPED}"
        )
    if path.suffix in (".yaml", ".yml") or len(path.parts) > len(folder.parts) + 1:
        near = neighbours(path) or did_you_mean(path.stem, shipped) or _recipes_in(path.parent)
        raise RecipeError(f"There is no recipe file {path}.{near}")
    raise RecipeError(
        f"There is no recipe {name_or_path!r}.{did_you_mean(name_or_path, shipped)} "
        f"Shipped: {', '.join(shipped)}; or give the path of a .yaml file."
    )


def meant_by(words: Sequence[str]) -> str:
    """Return a sentence about what a word that is not a setting may mean, to append to others; empty if unknown."""
    for word in words:
        if word in shipped_recipes() or word.endswith((".yaml", ".yml")):
            return f" Did you mean recipe={word}?"
        if find_architecture(word) is not None:
            return f" Did you mean model={word}?"
    return ""


def _recipes_in(folder: Path) -> str:
    """Return the way out for a file that was not found."""
    if not folder.is_dir():
        return f" There is no folder {folder}. {_SHIPPED}"
    return f" Recipes in {'this folder' if folder == Path() else folder}: {_yaml_names(folder)}. {_SHIPPED}"


_SHIPPED = (
    "`lowmem-ft recipes` lists the shipped ones, `lowmem-ft recipes NAME > my.yaml` writes one to start from."
)


def _yaml_names(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.y*ml"))
    return ", ".join([*names[:MOST_NAMED], *(["..."] if names[MOST_NAMED:] else [])]) or "none"


def _read(path: Path) -> RecipeFile:
    """Read the file's settings, with references resolved; ``${recipe_dir}`` is the folder that contains the file."""
    try:
        written = _read_yaml(path)
        resolved = resolve_references(written, str(path.parent.resolve()))
    except yaml.YAMLError as error:
        raise RecipeError(_yaml_problem(path, error)) from error
    except RecursionError as error:
        raise RecipeError(
            f"{path} is not a recipe: it is nested too deeply. Write `group: {{key: value}}`."
        ) from error
    except (OSError, OmegaConfBaseException, ValueError) as error:
        # ValueError: not UTF-8, or a number of thousands of digits
        raise RecipeError(f"{path} cannot be read as a recipe: {str(error).splitlines()[0]}.") from error
    except TooLongError as error:
        raise RecipeError(f"{path}: {error}") from error
    return RecipeFile(path=path, settings=resolved.settings, problems=resolved.problems)


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return what the file says, word for word."""
    return copy.deepcopy(_parsed(path, path.read_text(encoding="utf-8")))


@functools.lru_cache(maxsize=64)
def _parsed(path: Path, text: str) -> dict[str, Any]:
    """Return what a file of this text says; a ladder of settings reads the same few files hundreds of times."""
    config = OmegaConf.load(io.StringIO(text))
    if problems := [f"{path}, line {line}: {ambiguity(word)}" for line, word in ambiguous_numbers(text)]:
        raise RecipeError(*problems)
    if not OmegaConf.is_dict(config):
        raise RecipeError(f"{path} must hold `group: {{key: value}}` mappings, got a list.")
    settings = OmegaConf.to_container(config, resolve=False)
    assert isinstance(settings, dict)
    first = str(next(iter(settings), ""))
    if [*settings.values()] == [None] and re.search(r"\s", first):  # of a text OmegaConf makes a key
        raise RecipeError(
            f"{path} must hold `group: {{key: value}}` mappings, got text that begins with {first[:30]!r}. Name a "
            "recipe."
        )
    return {str(key): value for key, value in settings.items()}


def _yaml_problem(path: Path, error: yaml.YAMLError) -> str:
    if "expan" in str(error):  # of the limits that OmegaConf sets
        return f"{path} is not a recipe: its aliases (*name) expand to too much text. Write the values out."
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"{path} is not YAML: {error}."
    reason = " ".join(filter(None, (error.context, error.problem)))
    return f"{path}, line {error.problem_mark.line + 1}: not YAML: {reason}."


def _pop_base(file: RecipeFile) -> str | None:
    if "base" in file.problems:
        raise RecipeError(f"{file.path}: {file.problems['base']}")
    base = file.settings.pop("base", None)
    if base is not None and not isinstance(base, str):
        raise RecipeError(f"{file.path}: base must be one recipe name or path, got {base!r}.")
    return base
