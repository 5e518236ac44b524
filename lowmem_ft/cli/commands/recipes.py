"""``lowmem-ft recipes``: the shipped recipes, or one of them with every key explained."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.errors import raise_problems

if TYPE_CHECKING:
    from lowmem_ft.recipe import Recipe


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Print the list of recipes, or one recipe as YAML that can be edited and trained.

    Args:
        arguments: nothing, or a recipe's name or path and ``key=value`` settings; and ``--json``.

    Returns:
        The exit code, 0.
    """
    options = _parser().parse_args(arguments)
    raise_problems(file_problems(options, "json"))

    from lowmem_ft.recipe import load_recipe, recipe_to_yaml

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
    from lowmem_ft.recipe.reading.keys import recipe_keys

    return {path: key.value_in(recipe) for path, key in recipe_keys().items()}


def _print_list(json_to: str | None) -> None:
    """Print each recipe with what it needs on the GPU that it names, and its description, indented below.

    Args:
        json_to: file for the same as JSON, instead; ``-`` is stdout.
    """
    from lowmem_ft.recipe import load_recipe, shipped_recipes
    from lowmem_ft.recipe.shipped.needs import needs_of_shipped_recipes
    from lowmem_ft.reports.text.document import Pairs

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


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft recipes",
        description="List the shipped recipes with what each needs on the GPU it is made for, or print one with every "
        "default and what each memory knob frees and costs.",
    )
    parser.add_argument("recipe", nargs="?", help="a recipe's name or path")
    parser.add_argument(
        "settings", metavar="key=value", nargs="*", help="settings that override the recipe's"
    )
    parser.add_json()
    parser.add_overwrite()
    return parser
