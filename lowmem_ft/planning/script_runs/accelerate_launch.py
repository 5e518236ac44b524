"""The variables that ``accelerate launch --config_file FILE`` sets for a script, by Accelerate's own functions."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any

from lowmem_ft.foundation.accelerate_config import check_accelerate_config
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.upstream.patches import existing
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.planning.script_runs.launch import Launch


def by_accelerate(file: str | os.PathLike[str], num_gpus: int | None = None) -> Launch:
    """Return the first process that Accelerate starts.

    Args:
        file: a file of ``accelerate config``, as typed.
        num_gpus: GPUs that were asked for; None: as many as the file says.

    Raises:
        UserError: if it cannot be read, or what it launches cannot be estimated.
    """
    number, typed = check_accelerate_config(file, num_gpus), os.fspath(file)
    try:
        variables = _variables_of(os.fspath(expand_user(file)))
    except (ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"Accelerate does not take {typed}: {error}") from error
    further = {name: value for name, value in variables.items() if os.environ.get(name) != value}
    return Launch(
        num_processes=number,
        launcher=f"accelerate launch --config_file {typed}",
        further=further,
        sets_ranks=number > 1,
    )


def _variables_of(file: str) -> dict[str, str]:
    launch = _launch_module()
    args: Any = launch.launch_command_parser().parse_args(["--config_file", file, "train.py"])
    args, *_ = existing(launch, "_validate_launch_command")(args)
    if args.use_fsdp or args.multi_gpu:
        args.main_process_port = 0  # any: Accelerate would look whether another one is free
        return launch.prepare_multi_gpu_env(args)
    return launch.prepare_simple_launcher_cmd_env(args)[1]


def _launch_module() -> Any:
    """Import Accelerate's command, which gives the whole program a handler of logs as it is imported."""
    before = [*logging.root.handlers]
    try:
        return importlib.import_module("accelerate.commands.launch")
    finally:
        logging.root.handlers[:] = before
