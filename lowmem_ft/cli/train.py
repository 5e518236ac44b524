"""``lowmem-ft train``: the same program by itself and as one of several processes of ``accelerate launch``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lowmem_ft.cli.exit_codes import explains_user_errors
from lowmem_ft.cli.help_formatter import HelpFormatter
from lowmem_ft.errors import RecipeError

_EXAMPLES = """\
examples:
  lowmem-ft train recipe=demo
  lowmem-ft train recipe=7b-bf16 data=chats.jsonl data.eval_size=100
  lowmem-ft train recipe=my/recipe.yaml training.resume_from_checkpoint=auto
  accelerate launch --num_processes 2 -m lowmem_ft train recipe=1b-bf16

model=X, data=X and budget=X are short for model.name_or_path=X, data.path=X and budget.device=X.
`lowmem-ft recipes` lists the recipes; `lowmem-ft recipes NAME` shows every key with its default."""


@explains_user_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Train what the settings describe.

    Args:
        argv: ``recipe=NAME|PATH`` and further ``key=value`` settings; None: those of this process.

    Returns:
        The exit code, 0.

    Raises:
        RecipeError: if no recipe is named, or more than one.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(arguments):
        _parser().print_help()
        return 0
    recipe_name, settings = _split(arguments)

    from lowmem_ft.cli.logs import set_up_logging, take_over_library_logs
    from lowmem_ft.recipe import load_recipe
    from lowmem_ft.recipe.paths import check_paths_of_run
    from lowmem_ft.training.run_folder import RunFolder

    set_up_logging()
    recipe = load_recipe(recipe_name, settings)
    check_paths_of_run(recipe)
    folder = RunFolder.open(recipe)  # before the import below, which takes seconds

    from lowmem_ft.preflight import train

    take_over_library_logs()
    train(recipe, folder)
    return 0


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """The recipe's name or path, and the other settings."""
    choices = [argument for argument in arguments if argument.startswith("recipe=")]
    named = [choice.partition("=")[2] for choice in choices]
    if len(named) != 1 or not named[0]:
        seen = " ".join(choices or arguments) or "nothing"
        raise RecipeError(
            f"Training needs one recipe=NAME|PATH, got {seen}. Write for instance recipe=demo; "
            "`lowmem-ft recipes` lists the names."
        )
    return named[0], [argument for argument in arguments if not argument.startswith("recipe=")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lowmem-ft train",
        description="Fine-tune a model by a recipe, into a folder that HuggingFace transformers loads.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("recipe", metavar="recipe=NAME|PATH", help="a shipped recipe or a .yaml file")
    parser.add_argument(
        "settings", metavar="key=value", nargs="*", help="settings that override the recipe's"
    )
    return parser
