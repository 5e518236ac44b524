"""``lowmem-ft recipes``: the shipped recipes, or one of them with every key explained."""

from __future__ import annotations

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Print the list of recipes, or one recipe as YAML that can be edited and trained.

    Args:
        arguments: nothing, or a recipe's name or path and ``key=value`` settings.

    Returns:
        The exit code, 0.
    """
    options = _parser().parse_args(arguments)

    from lowmem_ft.recipe import load_recipe, recipe_to_yaml

    if options.recipe is None:
        _print_list()
        return 0
    recipe = load_recipe(options.recipe.removeprefix("recipe="), options.settings)
    print(
        f"# Save as FILE.yaml, edit, and: lowmem-ft train recipe=FILE.yaml\n"
        f"# On several GPUs: accelerate launch -m lowmem_ft train recipe=FILE.yaml\n\n{recipe_to_yaml(recipe)}",
        end="",
    )
    return 0


def _print_list() -> None:
    """Print each recipe with what it needs on the GPU that it names, and its description, indented below."""
    from lowmem_ft.recipe import load_recipe, shipped_recipes
    from lowmem_ft.recipe.shipped.needs import needs_of_shipped_recipes
    from lowmem_ft.reports.text.document import Pairs

    needs = needs_of_shipped_recipes()
    rows = [
        (name, f"{needs.get(name, 'not estimated')}\n{load_recipe(name).description or ''}")
        for name in shipped_recipes()
    ]
    Output().add(Pairs(rows, indent=0))


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
    return parser
