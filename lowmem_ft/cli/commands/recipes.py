"""``lowmem-ft recipes``: the shipped recipes, or one of them with every key explained."""

from __future__ import annotations

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.cli.console.written_files import file_problems
from lowmem_ft.foundation.errors import raise_problems


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

    from lowmem_ft.cli.answers.recipes import print_recipes

    return print_recipes(options)


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
