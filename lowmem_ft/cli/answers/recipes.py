"""The shipped recipes as a list, and one of them as YAML or JSON."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from lowmem_ft.cli.console.output import Output
from lowmem_ft.recipe import Recipe, load_recipe, recipe_to_yaml, shipped_recipes
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.shipped.needs import needs_of_shipped_recipes
from lowmem_ft.reports.text.document import Pairs


def print_recipes(options: argparse.Namespace) -> int:
    """Print the list of recipes, or one recipe as YAML that can be edited and trained.

    Args:
        options: the command's.

    Returns:
        The exit code, 0.
    """
    if options.recipe is None:
        _print_list(options.json)
        return 0
    recipe = load_recipe(options.recipe.removeprefix("recipe="), options.settings)
    if options.json:
        Output(options.json).write_json({"schema": 1, "settings": _settings(recipe)})
        return 0
    print(
        f"# Save as FILE.yaml, edit, and: lowmem-ft train recipe=FILE.yaml\n"
        f"# On several GPUs: accelerate launch -m lowmem_ft train recipe=FILE.yaml\n\n{recipe_to_yaml(recipe)}",
        end="",
    )
    return 0


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Return all settings of a recipe by their keys, such as ``training.seed``."""
    return {path: key.value_in(recipe) for path, key in recipe_keys().items()}


def _print_list(json_to: str | None) -> None:
    """Print each recipe with what it needs on the GPU that it names, and its description, indented below.

    Args:
        json_to: file for the same as JSON, instead; ``-`` is stdout.
    """
    needs = needs_of_shipped_recipes()
    descriptions = {name: load_recipe(name).description or "" for name in shipped_recipes()}
    if json_to:
        rows = [
            {
                "name": name,
                "description": description,
                "needs": dataclasses.asdict(needs[name]) if name in needs else None,
            }
            for name, description in descriptions.items()
        ]
        Output(json_to).write_json({"schema": 1, "recipes": rows})
        return
    pairs = ((name, f"{needs.get(name, 'not estimated')}\n{text}") for name, text in descriptions.items())
    Output().add(Pairs(pairs, indent=0))
