"""The start of a run: its data, its current and last step, and a warning about idle CPU cores."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.data.batches.stream import DataStream
from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.foundation.errors import CheckpointError, UserError
from lowmem_ft.foundation.system.launch_variables import is_main_process
from lowmem_ft.foundation.units import counted
from lowmem_ft.foundation.upstream.tested import warn_if_untested
from lowmem_ft.recipe import Recipe
from lowmem_ft.training.callbacks.run_metrics import RunMetrics
from lowmem_ft.training.folder.checkpoint_folders import Progress, read_progress, refuse_end_before
from lowmem_ft.training.processes.launched_gpus import expected_gpu
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.runtime import Runtime

logger = logging.getLogger(__name__)


def stream_from(recipe: Recipe, ranks: Ranks, data: PreparedData, position: DataPosition) -> DataStream:
    """Return this process's share of the training data, in windows, from a position on."""
    return DataStream(
        data.train,
        position=position,
        per_device_batch_size=recipe.training.per_device_train_batch_size,
        gradient_accumulation_steps=recipe.training.gradient_accumulation_steps,
        plan=ranks.plan,
        collate=data.collate,
    )


def progress_at(checkpoint: Path | None, recipe: Recipe, data: PreparedData) -> Progress:
    """Return the progress of a checkpoint, or of a run that starts from scratch.

    Raises:
        CheckpointError: if the checkpoint was made with other data, and the recipe does not consent.
    """
    data_tokens = None if data.summary is None else data.summary.num_tokens
    if checkpoint is None:
        return Progress(
            position=DataPosition(seed=recipe.training.seed),
            data_tokens=data_tokens,
            data_fingerprint=data.fingerprint,
        )
    progress = read_progress(checkpoint)
    # A position means nothing in other data; paths may change, because a run may move to another machine.
    other = None
    if progress.data_tokens != data_tokens:
        other = (
            f"was written with training data of {progress.data_tokens or 'streamed'} tokens, but the recipe's data now "
            f"has {data_tokens or 'streamed'}"
        )
    elif progress.data_fingerprint not in ("", data.fingerprint):
        other = (
            "was written with other rows: as many tokens, but not the same ones, or not the same ones learnt"
        )
    if other and not recipe.training.resume_with_other_data:
        raise CheckpointError(
            f"{checkpoint} {other}. Restore the data, choose another training.output_dir, or let the run continue at "
            "its place among the new rows with training.resume_with_other_data=true."
        )
    if other:
        logger.warning("Resuming with other data: %s %s.", checkpoint, other)
    return replace(progress, data_tokens=data_tokens, data_fingerprint=data.fingerprint)


def write_sources(data: PreparedData, metrics: RunMetrics, step: int) -> None:
    """Write to the metrics what an epoch takes from each of several sources."""
    if data.sources:
        metrics.write({"step": step, "sources": [asdict(source) for source in data.sources]})


def num_training_steps(
    recipe: Recipe, stream: DataStream, progress: Progress, checkpoint: Path | None
) -> int:
    """Return the steps in all: those taken, and the rest of the epochs at the present number of rows per step.

    Raises:
        UserError: if the warmup is longer.
        CheckpointError: if the checkpoint is already beyond the last step.
    """
    config, taken = recipe.training, progress.step
    if config.max_steps > 0:
        num_steps = config.max_steps
    else:
        assert stream.steps_per_epoch is not None, "check_recipe requires max_steps with a stream"
        in_all = math.ceil(config.num_train_epochs * stream.steps_per_epoch)
        num_steps = taken + in_all - stream.steps_done
    if config.warmup_steps > num_steps:
        raise UserError(
            f"training.warmup_steps={config.warmup_steps:.0f} is more than the {num_steps} steps of this run: the "
            "learning rate would never reach training.learning_rate. Lower it, or give a share of all steps, such "
            "as 0.03."
        )
    compares = {
        "load_best_model_at_end": config.load_best_model_at_end,
        "early_stopping_patience": config.early_stopping_patience is not None,
    }
    if any(compares.values()) and (config.eval_steps or 0) >= num_steps:
        logger.warning(
            "training.eval_steps=%d makes one evaluation in the %d steps of this run, and training.%s compares "
            "several. Lower it.",
            *(config.eval_steps, num_steps, next(name for name, is_set in compares.items() if is_set)),
        )
    refuse_end_before(checkpoint, taken, num_steps)
    return num_steps


def log_start(recipe: Recipe, runtime: Runtime, progress: Progress, num_steps: int) -> None:
    """Log the run's device, processes and steps."""
    if is_main_process():
        warn_if_untested()  # for libraries that only some recipes import
    config = recipe.training
    if runtime.machine.device.type == "cpu":
        _warn_of_idle_cores(runtime.ranks.num_processes)
        if not config.use_cpu and (reason := expected_gpu()) is not None:
            logger.warning(
                "Training on the processor, because torch sees no GPU: %s. Set training.use_cpu=true if this is "
                "intended.",
                reason,
            )
    if recipe.adapter.name != "none" and recipe.model.weights == "random":
        logger.warning(
            "Adapters belong to the base weights that they were trained on, and random ones (model.weights=random) "
            "are not kept: the adapters of this run cannot be merged or used."
        )
    plan = runtime.ranks.plan
    examples = plan.rows_at_once(config.per_device_train_batch_size) * config.gradient_accumulation_steps
    left = f"steps {progress.step + 1} to {num_steps}, {counted(examples, 'example')} a step"
    logger.info(
        "Training on %s (torch %s), %s: %s.",
        runtime.machine.device,
        torch.__version__,
        counted(plan.num_processes, "process", "processes"),
        left if progress.step < num_steps else f"no step is left of {num_steps}",
    )


def _warn_of_idle_cores(num_processes_here: int) -> None:
    """Warn if ``OMP_NUM_THREADS`` keeps cores idle, with a way out that depends on the launcher that set it.

    ``accelerate launch`` sets it to 1, and so does torchrun for several processes. If it is not set, torch uses one
    thread per physical core, which is fastest. More threads than idle cores wait for each other, so a machine that
    is busy gets no such advice.

    Args:
        num_processes_here: processes of this run, all assumed to be on this machine.
    """
    threads, cores = torch.get_num_threads() * num_processes_here, os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ or threads >= cores - _busy_cores():
        return
    logger.warning(
        "Using %d of %d cores, because OMP_NUM_THREADS=%s. To use all, %s.",
        threads,
        cores,
        os.environ["OMP_NUM_THREADS"],
        _way_out(max(1, cores // num_processes_here)),
    )


def _busy_cores() -> int:
    """Return the cores on which other programs have been running for a minute, where the system counts them."""
    if not hasattr(os, "getloadavg"):  # Windows
        return 0
    return max(0, round(os.getloadavg()[0]) - 1)  # one is this process


def _way_out(num_threads: int) -> str:
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # accelerate launch always sets it
        return f"add --num_cpu_threads_per_process={num_threads} to accelerate launch"
    return f"set OMP_NUM_THREADS={num_threads}"
