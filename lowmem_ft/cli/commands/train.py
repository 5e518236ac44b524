"""``lowmem-ft train``: the same program by itself and as one of several processes of ``accelerate launch``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowmem_ft.cli.console.asking import check_data
from lowmem_ft.cli.console.exit_codes import explains_user_errors
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.console.parser import Parser
from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.system.interrupts import on_interrupt
from lowmem_ft.foundation.system.launch_variables import is_launched, is_main_process
from lowmem_ft.foundation.system.signals import NOTHING_TRAINED

if TYPE_CHECKING:
    from lowmem_ft.training.export.train_result import TrainResult

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
        _train(arguments)
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


def _train(words: list[str]) -> None:
    from lowmem_ft.cli.console.logs import set_up_logging, take_over_library_logs
    from lowmem_ft.cli.processes.cpu_launch import start_requested_processes
    from lowmem_ft.foundation.allocator_setting import use_growing_segments
    from lowmem_ft.recipe.request.request import Request
    from lowmem_ft.recipe.rules.engine_rules import problems_with_processes
    from lowmem_ft.training.folder.run_folder import RunFolder
    from lowmem_ft.training.processes.launch import as_launched, read_launch

    if asked := [word for word in words if word.lstrip("-").partition("=")[0] in ("gpu", "gpus")]:
        raise UserError(
            f"Training runs on this machine, got {asked[0]}: --gpu is for `lowmem-ft estimate` and `lowmem-ft plan`. "
            "Leave it out."
        )
    set_up_logging()
    use_growing_segments()
    request = Request.of("train", words)
    recipe = request.recipe
    start_requested_processes(use_cpu=recipe.training.use_cpu)
    launch = read_launch(use_cpu=recipe.training.use_cpu)
    request.check(
        lambda: raise_problems(problems_with_processes(as_launched(recipe, launch), launch.num_processes))
    )
    if recipe.training.push_to_hub:
        from lowmem_ft.training.export.hub_upload import check_upload

        check_upload()
    # Before the imports below, which take seconds. A resumed run takes its plan from its folder before that is opened.
    may_open = not recipe.undecided_keys or recipe.training.resume_from_checkpoint is None
    folder = RunFolder.open(recipe) if may_open else None

    check_data(recipe.data)

    from lowmem_ft.planning.preflight.train import train

    take_over_library_logs()  # of what this imported
    result = train(recipe, folder)
    if is_main_process():
        _print_report(result)


def _print_report(result: TrainResult) -> None:
    """Print the report of a finished run, as ``lowmem-ft report`` will print it again."""
    from lowmem_ft.reports.run_record import read_run
    from lowmem_ft.reports.run_report import run_report

    Output().add(run_report([read_run(result.output_dir)]))


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
