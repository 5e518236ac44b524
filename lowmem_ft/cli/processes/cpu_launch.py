"""Start of the processes that ``accelerate launch`` was asked for and has not started, or the reason why it cannot.

Accelerate (up to 1.15 at least) silently starts a single process if it is configured for a CPU (only ``mpirun`` starts
several there) or sees fewer than two GPUs. A run would then train with 1/N of the batch that the user asked for. On a
CPU torch's own launcher can start them.
"""

from __future__ import annotations

import logging
import os
import sys

import psutil

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.parallel_plan import ParallelPlan

logger = logging.getLogger(__name__)


def start_requested_processes(*, use_cpu: bool) -> None:
    """Replace this process by torch's launcher with N processes, if Accelerate was asked for N and started one.

    The launcher is no child: it takes this process's place and id, so that signals and exit codes are its own.

    Args:
        use_cpu: whether the recipe trains on the CPU.

    Raises:
        UserError: if they cannot be started here.
    """
    asked = _asked_of_accelerate()
    if asked is None or not asked.several:
        return
    if asked.num_machines > 1:
        raise UserError(_alone_of_machines(asked))
    if not use_cpu and os.environ["ACCELERATE_USE_CPU"].lower() != "true":
        raise UserError(_without_gpus(asked))
    logger.info(
        "Accelerate starts one process on a CPU; starting the %d asked for with torchrun.",
        asked.num_processes,
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={asked.num_processes}"]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *launcher, *sys.orig_argv[1:]])


def _asked_of_accelerate() -> ParallelPlan | None:
    """Return what the ``accelerate launch`` above this process was asked for.

    None if there is no such parent, or this process is already one of several.
    """
    if "LOCAL_RANK" in os.environ or "ACCELERATE_USE_CPU" not in os.environ:
        return None
    parent = psutil.Process().parent()
    command = [] if parent is None else parent.cmdline()
    launch = next((index for index, word in enumerate(command) if _is_launch_command(word)), None)
    if launch is None:
        return None
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    options, _ = launch_command_parser().parse_known_args(command[launch + 1 :])
    file = options.config_file
    if file is None and os.path.isfile(default_config_file) and not options.cpu:
        file = default_config_file
    configured = None if file is None else load_config_from_file(file)
    num_processes, num_machines = (
        getattr(options, name) or getattr(configured, name, None) or 1
        for name in ("num_processes", "num_machines")
    )
    return ParallelPlan(num_processes=num_processes, num_machines=num_machines)


def _is_launch_command(word: str) -> bool:
    """Return whether a word ends the name of the launcher.

    It is called as ``accelerate launch``, ``accelerate-launch`` or ``python -m accelerate.commands.launch``.
    """
    return word in ("launch", "accelerate.commands.launch") or word.endswith(
        ("accelerate-launch", os.path.join("accelerate", "commands", "launch.py"))
    )


def _without_gpus(asked: ParallelPlan) -> str:
    import torch

    from lowmem_ft.training.processes.launched_gpus import why_no_gpu

    seen = f"none: {why_no_gpu(os.environ)}" if not torch.cuda.is_available() else "one"
    return (
        f"`accelerate launch` was asked for {asked.num_processes} processes and has started one, because it found no "
        f"GPUs: torch sees {seen}. Set training.use_cpu=true to train in {asked.num_processes} processes on the "
        "processor, or --num_processes 1 to train in one."
    )


def _alone_of_machines(asked: ParallelPlan) -> str:
    return (
        f"`accelerate launch` was asked for {asked.num_processes} processes on {asked.num_machines} machines, and has "
        "started one without the others. Add --multi_gpu for machines of one GPU each, or start torchrun on each "
        f"machine: `torchrun --nnodes={asked.num_machines} --nproc_per_node={asked.per_machine} --node_rank=... "
        "--master_addr=... --master_port=29500 ...`."
    )
