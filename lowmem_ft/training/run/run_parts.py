"""The parts of a run, made in their order: runtime, budget, tokenizer, data, and the weights last.

What can fail fast comes first. Where the run resumes, each part has the state that its checkpoint kept of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase, set_seed

from lowmem_ft.data.batches.stream import DataStream
from lowmem_ft.data.prepared_data import PreparedData
from lowmem_ft.models.tokenizer import load_tokenizer
from lowmem_ft.recipe import Recipe, TrainingConfig
from lowmem_ft.training.callbacks.callbacks import Callbacks, callbacks_of_run
from lowmem_ft.training.checkpoints.checkpoint import load_checkpoint
from lowmem_ft.training.evaluation.run_generations import RunGenerations
from lowmem_ft.training.export.hub_upload import check_upload
from lowmem_ft.training.folder.changed_recipe import refuse_other_kernels
from lowmem_ft.training.folder.checkpoint_folders import Progress
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.processes.launch import Launch, as_launched
from lowmem_ft.training.run.preflight import Preflight, PreflightChecks
from lowmem_ft.training.run.run_memory import RunMemory
from lowmem_ft.training.run.start import num_training_steps, progress_at, stream_from
from lowmem_ft.training.runtimes.build import build_session, plan_session, refuse_unknown_names, resumed
from lowmem_ft.training.runtimes.process_group import join_processes
from lowmem_ft.training.runtimes.reading_data import read_data
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.budget_cap import BudgetWatch, apply_budget
from lowmem_ft.training.step.causality_check import (
    refuse_bidirectional_weights,
    refuse_dependent_parts,
    refuse_leaking_documents,
)
from lowmem_ft.training.step.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class RunParts:
    """The parts of a run that is ready to step; :meth:`build` makes them from a recipe.

    Args:
        recipe: the recipe that is trained.
        folder: the folder that the run writes to, and the checkpoint that it resumes from.
        runtime: the device and the processes.
        budget_watch: compares memory with the budgets of device and host.
        tokenizer: saved with the weights.
        data: the tokenized data.
        stream: its training part in windows, from the run's position on.
        progress: the run's position.
        num_steps: the step at which the run ends.
        session: the model with its optimizer.
        memory: the run's peaks so far, and its estimate.
        callbacks: called in the main process, early stopping among them.
        generations: the prompts that the model answers at evaluations.
    """

    recipe: Recipe
    folder: RunFolder
    runtime: Runtime
    budget_watch: BudgetWatch
    tokenizer: PreTrainedTokenizerBase
    data: PreparedData
    stream: DataStream
    progress: Progress
    num_steps: int
    session: Session
    memory: RunMemory
    callbacks: Callbacks
    generations: RunGenerations

    @classmethod
    def build(
        cls,
        recipe: Recipe,
        folder: RunFolder | None = None,
        runtime: Runtime | None = None,
        preflight: Preflight | None = None,
        callbacks: Sequence[object] = (),
    ) -> Self:
        """Tokenize the data, load the model, and restore the folder's checkpoint.

        Args:
            recipe: see :func:`~lowmem_ft.training.run.loop.train`.
            folder: see there; None: opened here.
            runtime: see there; None: made here.
            preflight: see there; None: the run is not estimated.
            callbacks: see there.

        Returns:
            The run, before its first step.
        """
        config = recipe.training
        folder = folder or RunFolder.open(recipe)
        if config.push_to_hub:
            check_upload()
        if runtime is None:
            runtime, launched = join_processes(recipe, folder)
        else:
            launched = as_launched(recipe, Launch(num_processes=runtime.ranks.num_processes))
        _seed_generators(config)
        resume_from = folder.resume_from
        with runtime.ranks.failing_together():
            budget_watch = _within_budget(recipe, runtime)
            built = launched if resume_from is None else resumed(launched, resume_from)
            plan = plan_session(built, runtime)
            refuse_unknown_names(built, plan)
            tokenizer = load_tokenizer(built.model)
        checks = PreflightChecks(preflight, built, runtime)
        checks.before_data()
        data = read_data(built, runtime.ranks, tokenizer, plan)
        memory = RunMemory(runtime.machine.device)
        memory.estimate = checks.after_data(data)
        with runtime.ranks.failing_together():
            progress = progress_at(resume_from, recipe, data)
            stream = stream_from(recipe, runtime.ranks, data, progress.position)
            num_steps = num_training_steps(recipe, stream, progress, resume_from)
        generations = RunGenerations.of(recipe, runtime, folder.path, data, tokenizer)
        with memory.during("load"):
            session = build_session(
                built,
                runtime,
                plan,
                num_training_steps=num_steps,
                in_pieces=progress.cut.max_tokens is not None,
            )
            _check_and_restore(session, recipe, runtime, resume_from)
            if resume_from is not None:
                logger.info("Resuming from %s at step %d.", resume_from, progress.step)
        return cls(
            recipe=recipe,
            folder=folder,
            runtime=runtime,
            budget_watch=budget_watch,
            tokenizer=tokenizer,
            data=data,
            stream=stream,
            progress=progress,
            num_steps=num_steps,
            session=session,
            memory=memory,
            callbacks=callbacks_of_run(callbacks, config, progress, runtime.ranks),
            generations=generations,
        )


def _within_budget(recipe: Recipe, runtime: Runtime) -> BudgetWatch:
    """Apply the budget to this process, and return what compares memory with it."""
    machine = runtime.machine
    apply_budget(
        recipe.budget,
        machine.device,
        host=machine.host,
        uses_bitsandbytes=recipe.uses_bitsandbytes,
        num_processes=runtime.ranks.num_processes,
        num_processes_here=machine.num_processes_here,
    )
    return BudgetWatch(recipe.budget, machine.device, machine.num_processes_here, machine.host)


def _check_and_restore(session: Session, recipe: Recipe, runtime: Runtime, resume_from: Path | None) -> None:
    """Check that a loaded model looks at no later tokens, and give it the state of the checkpoint."""
    refuse_bidirectional_weights(session, recipe.model.name_or_path or "")
    refuse_dependent_parts(session, recipe.model.name_or_path or "")
    if recipe.data.packing:
        refuse_leaking_documents(session, recipe.model.name_or_path or "")
    # Loading and wrapping may draw random numbers; dropout must not depend on how many they draw.
    _seed_generators(recipe.training, runtime.ranks.process_index)
    if resume_from is not None:
        refuse_other_kernels(recipe, resume_from, session.techniques.kernels())
        load_checkpoint(resume_from, session, runtime)


def _seed_generators(config: TrainingConfig, process_index: int = 0) -> None:
    """Seed Python's, numpy's and torch's generators; each process draws other numbers."""
    set_seed(config.seed + process_index, deterministic=config.full_determinism)
