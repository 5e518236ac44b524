"""A training run from its words to its report; torch is imported after all checks that need none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowmem_ft.cli.console.asking import check_data, start_logging, take_over_library_logs
from lowmem_ft.cli.console.output import Output
from lowmem_ft.cli.processes.cpu_launch import start_requested_processes
from lowmem_ft.foundation.allocator_setting import use_growing_segments
from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.system.launch_variables import is_main_process
from lowmem_ft.recipe.request.request import Request
from lowmem_ft.recipe.rules.engine_rules import problems_with_processes
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.processes.launch import as_launched, read_launch

if TYPE_CHECKING:
    from lowmem_ft.training.export.train_result import TrainResult


def train_by(words: list[str]) -> None:
    """Train what settings describe, and print the report.

    Args:
        words: as typed.

    Raises:
        UserError: if no run can be made of them; most of it is known before torch is imported.
    """
    if asked := [word for word in words if word.lstrip("-").partition("=")[0] in ("gpu", "gpus")]:
        raise UserError(
            f"Training runs on this machine, got {asked[0]}: --gpu is for `lowmem-ft estimate` and `lowmem-ft plan`. "
            "Leave it out."
        )
    start_logging()
    use_growing_segments()
    request = Request.of("train", words)
    recipe = request.recipe
    start_requested_processes(use_cpu=recipe.training.use_cpu)
    launch = read_launch(use_cpu=recipe.training.use_cpu)
    request.check(
        lambda: raise_problems(problems_with_processes(as_launched(recipe, launch), launch.num_processes))
    )
    if recipe.training.push_to_hub:
        from lowmem_ft.training.export.hub_upload import check_upload  # the hub's package

        check_upload()
    # Before the imports below, which take seconds. A resumed run takes its plan from its folder before that is opened.
    may_open = not recipe.undecided_keys or recipe.training.resume_from_checkpoint is None
    folder = RunFolder.open(recipe) if may_open else None

    check_data(recipe.data)

    from lowmem_ft.planning.preflight.train import train  # torch, and all that a run needs

    take_over_library_logs()  # of what this imported
    result = train(recipe, folder)
    if is_main_process():
        _print_report(result)


def _print_report(result: TrainResult) -> None:
    """Print the report of a finished run, as ``lowmem-ft report`` will print it again."""
    from lowmem_ft.reports.run_record import read_run  # NumPy, which no wrong word waits for
    from lowmem_ft.reports.run_report import run_report

    Output().add(run_report([read_run(result.output_dir)]))
