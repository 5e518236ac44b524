"""Folders that a run must not write into: they belong to something else, or would be read as data next time."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from lowmem_ft.data.sources.listed import ListedSource, listed_sources
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.user_paths import address_problem, expand_user
from lowmem_ft.recipe.tree import Recipe

RECIPE_FILE, METRICS_FILE = "recipe.yaml", "metrics.jsonl"


def run_folder_of(recipe: Recipe) -> Path:
    """Return the folder that a run of the recipe writes to."""
    return expand_user(recipe.training.output_dir or f"runs/{recipe.name}")


def holds_a_run(folder: Path) -> bool:
    """Return whether a run has written its recipe and its metrics there."""
    return (folder / RECIPE_FILE).is_file() and (folder / METRICS_FILE).is_file()


def refuse_output_folder(recipe: Recipe) -> None:
    """Refuse a file, a root, a home, a checkout's root, and the folders of model and data; a run's own may stay.

    Raises:
        UserError: if ``training.output_dir`` is one of them.
    """
    if recipe.training.output_dir and address_problem("", recipe.training.output_dir):
        raise UserError(
            f"training.output_dir is a folder on this machine, got the address {recipe.training.output_dir}. Name a "
            "folder, and copy it when the run has ended."
        )
    folder = run_folder_of(recipe)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"training.output_dir={folder} is a file. Name a folder.")
    problem = None if holds_a_run(folder) else _problem(Path(os.path.realpath(folder)), recipe)
    if problem is not None:
        raise UserError(
            f"training.output_dir must be a folder only for a run, got {folder}, {problem} Name another one, such as "
            f"{Path('runs', recipe.name)}."
        )


def _problem(folder: Path, recipe: Recipe) -> str | None:
    home = Path(os.path.expanduser("~")).resolve()
    if folder == Path(folder.anchor):
        return "the root of the file system."
    if folder == home:
        return "your home folder."
    if folder in home.parents:
        return "which holds the home folders."
    if (folder / ".git").exists():
        return "the root of a git checkout."
    read = [(setting, path) for setting, value in inputs_of(recipe).items() for path in _named(value)]
    for setting, path in read:
        if folder == (path if path.is_dir() else path.parent):
            return f"which contains {setting}={inputs_of(recipe)[setting]}."
        if setting.startswith("data.") and path.is_dir() and path in folder.parents:
            return (
                f"inside of {setting}={inputs_of(recipe)[setting]}, which would read the run's files as data."
            )
    return None


def inputs_of(recipe: Recipe) -> dict[str, str | None]:
    """Return the model, the data and the prompts that a run reads, by key."""
    return {
        "model.name_or_path": recipe.model.name_or_path,
        "model.tokenizer_name_or_path": recipe.model.tokenizer_name_or_path,
        **{_setting(number, one): one.path for number, one in enumerate(listed_sources(recipe.data))},
        "data.eval_path": recipe.data.eval_path,
        "training.generation_prompts": recipe.training.generation_prompts,
    }


def _setting(number: int, listed: ListedSource) -> str:
    """Return the key of a source; the paths in a list with commas have the same, and a number."""
    return f"{listed.setting}[{number}]" if number and listed.index is None else listed.setting


def _named(value: str | None) -> list[Path]:
    """Return the files on this machine that a path or a glob names."""
    if value is None:
        return []
    path = expand_user(value)
    found = [path] if path.exists() else map(Path, glob.glob(str(path), recursive=True))
    return [Path(os.path.realpath(file)) for file in found]  # resolve() raises where a link leads to itself
