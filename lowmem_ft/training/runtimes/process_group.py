"""Starts the process group of a run: rendezvous, agreement with the launch, ``init_process_group``."""

from __future__ import annotations

import contextlib

from lowmem_ft.foundation.system.launch_variables import whole_number
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.processes.launch import as_launched, read_launch
from lowmem_ft.training.processes.launched_gpus import own_gpu, run_near_own_gpu
from lowmem_ft.training.processes.rendezvous import explained_joining, rendezvous
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.deepspeed_runtime import deepspeed_runtime
from lowmem_ft.training.runtimes.runtime import Runtime


def join_processes(recipe: Recipe, folder: RunFolder) -> tuple[Runtime, Recipe]:
    """Join the other processes of the launcher, if there are any, and take a device.

    Args:
        recipe: this process's recipe.
        folder: the run's folder; the checkpoint to resume from has to be the same in every process.

    Returns:
        The runtime, and the recipe as launched.

    Raises:
        UserError: if recipe and launch disagree, or the processes disagree, or one of them does not arrive or has no
            GPU of its own.
    """
    launch = read_launch(use_cpu=recipe.training.use_cpu)
    launched = as_launched(recipe, launch)
    if launch.num_processes > 1:
        gpu = own_gpu(launch, use_cpu=recipe.training.use_cpu)
        rendezvous(
            recipe, checkpoint=None if folder.resume_from is None else folder.resume_from.name, gpu=gpu
        )
        if gpu:
            run_near_own_gpu()  # before any host memory is pinned
    joins = (
        launch.num_processes > 1 or whole_number("LOCAL_RANK") is not None
    )  # which Accelerate takes for a launch
    with explained_joining() if joins else contextlib.nullcontext():
        of_launch = deepspeed_runtime if launched.distributed.plan().has_engine else launched_runtime
        return of_launch(launched.training, folder.path, launched.distributed), launched
