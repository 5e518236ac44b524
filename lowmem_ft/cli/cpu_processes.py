"""Start as many CPU processes as ``accelerate launch --cpu --num_processes N`` was asked for.

Accelerate (up to 1.15 at least) starts a single process there and says nothing: several CPU processes are for
``mpirun`` alone. A run would then train with 1/N of the batch that was asked for. torch's own launcher can do it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import psutil

logger = logging.getLogger(__name__)


def start_requested_cpu_processes(program: Sequence[str], arguments: Sequence[str]) -> None:
    """Replace this process by torch's launcher with N processes, if Accelerate was asked for N and started one.

    Args:
        program: what to run in each process: a Python file, or ``-m`` and a module.
        arguments: its arguments.
    """
    num_processes = _requested_cpu_processes()
    if num_processes < 2:
        return
    logger.info(
        "Accelerate starts one process on a CPU; starting the %d asked for with torchrun.", num_processes
    )
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={num_processes}",
    ]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, *program, *arguments])


def _requested_cpu_processes() -> int:
    """N of the ``accelerate launch --cpu --num_processes N`` above this process; 1 if there is none or it is obeyed."""
    is_one_of_several = "LOCAL_RANK" in os.environ
    if is_one_of_several or os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
        return 1
    parent = psutil.Process().parent()
    command = [] if parent is None else parent.cmdline()
    launch = next((index for index, word in enumerate(command) if _is_launch_command(word)), None)
    if launch is None:
        return 1
    from accelerate.commands.launch import launch_command_parser

    options, _ = launch_command_parser().parse_known_args(command[launch + 1 :])
    return options.num_processes or 1 if options.cpu else 1


def _is_launch_command(word: str) -> bool:
    """``accelerate launch``, ``accelerate-launch`` and ``python -m accelerate.commands.launch``."""
    return word in ("launch", "accelerate.commands.launch") or word.endswith(
        ("accelerate-launch", os.path.join("accelerate", "commands", "launch.py"))
    )
