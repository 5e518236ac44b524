"""``lowmem-ft train``: the same program by itself and as one of several processes of ``accelerate launch``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.interrupts import on_interrupt
from lowmem_ft.foundation.system.launch_variables import is_launched
from lowmem_ft.foundation.system.signals import NOTHING_TRAINED

_EXAMPLES = """\
examples:
  lowmem-ft train recipe=demo
  lowmem-ft train recipe=7b-bf16 data=chats.jsonl data.eval_size=100
  lowmem-ft train recipe=my/recipe.yaml training.resume_from_checkpoint=auto
  accelerate launch --num_processes 2 -m lowmem_ft train recipe=1b-bf16
  lowmem-ft train recipe=7b-bf16 data=chats.jsonl budget=24GiB plan=auto
  lowmem-ft train model=Qwen/Qwen2.5-7B data=chats.jsonl budget=24GiB

model=X, data=X and budget=X are short for model.name_or_path=X, data.path=X and budget.device=X. plan=auto, or a
model, data and a budget without a recipe: the memory settings are chosen first, as `lowmem-ft plan` does;
checkpointing.mode=auto: only the checkpointed layers are chosen.
`lowmem-ft recipes` lists the recipes; `lowmem-ft recipes NAME` shows every key with its default."""


@explains_user_errors
def main(arguments: list[str]) -> int:
    """Train what the settings describe.

    Args:
        arguments: ``recipe=NAME|PATH`` and further ``key=value`` settings.

    Returns:
        The exit code, 0.
    """
    if {"-h", "--help"} & set(arguments):
        _parser().print_help()
        return 0
    with on_interrupt(NOTHING_TRAINED), _told_to_all_processes():
        from lowmem_ft.cli.answers.train import train_by

        train_by(arguments)
    return 0


@contextlib.contextmanager
def _told_to_all_processes() -> Iterator[None]:
    """Propagate this process's ``UserError`` to the others of a launch, which would wait for it."""
    try:
        yield
    except UserError as error:
        if is_launched():
            from lowmem_ft.training.processes.rendezvous import tell_others

            tell_others(error)
        raise


def _parser() -> Parser:
    parser = Parser(
        prog="lowmem-ft train",
        usage="lowmem-ft train recipe=NAME|PATH [key=value ...]\n"
        "       lowmem-ft train model=X data=X budget=X [key=value ...]",
        description="Fine-tune a model by a recipe, and write a folder that HuggingFace transformers loads.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "recipe",
        metavar="recipe=NAME|PATH",
        help="a shipped recipe or a .yaml file; without one, a plan is made for model=, data= and budget=",
    )
    parser.add_argument(
        "settings", metavar="key=value", nargs="*", help="settings that override the recipe's"
    )
    return parser
