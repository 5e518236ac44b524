"""Rehearsal: ``train()``'s own loop, from the data to the finished model, on a virtual GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.catalog.gpu_spec import Gpu
from lowmem_ft.foundation.errors import Interrupted, ModelError, RaceError, UserError
from lowmem_ft.foundation.memory.memory_estimate import MemoryEstimate
from lowmem_ft.foundation.system.garbage_collector import collector_paused
from lowmem_ft.foundation.system.log_capture import log_heard
from lowmem_ft.foundation.tensors.triton_use import said_of_virtual_gpus
from lowmem_ft.models.hf_config import vocab_size
from lowmem_ft.models.tokenizer import load_tokenizer
from lowmem_ft.planning.estimator import estimate_memory
from lowmem_ft.planning.estimator.device_target import choose_gpu
from lowmem_ft.planning.estimator.estimate import estimate_of_trace
from lowmem_ft.planning.estimator.traces.trace_cache import KeptTraces
from lowmem_ft.planning.estimator.traces.traced_recipe import TracedRecipe
from lowmem_ft.planning.estimator.traces.tracing import copied_weight_bytes, mark_weight_memory
from lowmem_ft.planning.rehearsal.findings import Findings
from lowmem_ft.planning.rehearsal.records import Records
from lowmem_ft.planning.rehearsal.result import Rehearsal
from lowmem_ft.planning.rehearsal.runtime import rehearsal_runtime
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.recipe.gpu_count import on_gpus
from lowmem_ft.recipe.named_recipe import RecipeLike, as_recipe
from lowmem_ft.recipe.rules.conflicts import LARGEST_WHOLE_NUMBER
from lowmem_ft.recipe.space.search_space import with_settings
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.run.loop import TrainingRun
from lowmem_ft.training.run.unplanned import refuse_unplanned
from lowmem_ft.training.step.budget_cap import lift_cap
from lowmem_ft.training.step.deterministic_kernels import deterministic_kernels
from lowmem_ft.virtual_gpu.gpu import VirtualGPU


def rehearse(
    recipe: RecipeLike,
    gpu: str | Gpu | None = None,
    *,
    steps: int | None = None,
    kept: KeptTraces | None = None,
    on_step: Callable[[int, int], None] = lambda step, shapes: None,
) -> Rehearsal:
    """Execute a complete training run without its values: its data, loop, evaluations and files.

    The recipe's data is read, tokenized and batched as in training; the model is built from its config alone, on a
    virtual GPU. One step is traced for each shape of data, see ``planning/rehearsal/window_shapes.py``; further steps
    of that shape are counted. Races between streams are detected. Output goes to a temporary folder that is deleted.

    Args:
        recipe: the run to rehearse, or the name or path of its recipe.
        gpu: a GPU or its name in the catalogue; None: this machine's, else one of the size of the budget.
        steps: number to rehearse, from the first of the run; None: all.
        kept: cached traces for the estimate of the worst batch, as for :func:`lowmem_ft.estimate_memory`.
        on_step: called at each step with its number and the number of shapes traced so far.

    Returns:
        The results.

    Raises:
        UserError: if the catalogue has no such GPU, the GPU or the data cannot be used, or the run has fewer steps.
        ModelError: if the model or its tokenizer cannot be found, or its forward cannot be traced.
    """
    began = time.perf_counter()
    recipe = as_recipe(recipe)
    check_recipe(recipe)
    refuse_unplanned(recipe)
    asked = recipe
    recipe, spec = _on_one_gpu(recipe, gpu)
    if steps is not None and steps < 1:
        raise UserError(f"A rehearsal takes at least one step, got steps={steps}.")
    _refuse_without_tokenizer(recipe)
    worst = estimate_memory(recipe, spec, kept=kept)
    # Trackers and the Hub must not hear of a rehearsal, and losses without values must not end it.
    unheard: dict[str, Any] = {"training.push_to_hub": False, "training.report_to": ()}
    if recipe.training.early_stopping_patience is not None:
        unheard["training.early_stopping_patience"] = LARGEST_WHOLE_NUMBER  # other keys need one
    recipe = with_settings(recipe, unheard)
    with _warnings_heard() as warnings, tempfile.TemporaryDirectory(prefix="lowmem_ft-rehearsal-") as folder:
        run, machine = _run(recipe, spec, _folder_of(recipe, Path(folder), warnings), steps, on_step)
    estimate, findings = _estimated(recipe, spec, run, machine)
    found = findings.rehearsal(estimate, worst, tuple(warnings), time.perf_counter() - began)
    return dataclasses.replace(found, recipe=asked)


@dataclass(frozen=True)
class RehearsedRun:
    """A run whose loop has ended.

    Args:
        records: what the loop left behind.
        num_steps: steps of the whole run, or those left of a resumed one.
        copied_weight_bytes: see :class:`~lowmem_ft.planning.estimator.traces.traced_recipe.TracedRecipe`.
        vocabulary_size: tokens of the model's vocabulary, see there too.
        load_end: number of events that the timeline had when the model was built.
        num_held_out_sources: sources that each evaluation goes through.
    """

    records: Records
    num_steps: int
    copied_weight_bytes: int
    vocabulary_size: int
    load_end: int
    num_held_out_sources: int


def _on_one_gpu(recipe: Recipe, gpu: str | Gpu | None) -> tuple[Recipe, Gpu]:
    recipe, named = on_gpus(recipe, gpu) if isinstance(gpu, str) else (on_gpus(recipe, None)[0], gpu)
    if recipe.distributed.num_processes not in (None, 1):
        raise UserError(
            f"A rehearsal is for one process, got distributed.num_processes={recipe.distributed.num_processes}. "
            "`lowmem-ft estimate` with the same settings and --gpu shows what each of several processes needs. To "
            "rehearse data, warnings and files, set distributed.strategy=none distributed.num_processes=1 and name one "
            "GPU."
        )
    spec, _ = choose_gpu(named, recipe.budget, use_cpu=False)
    if spec is None:
        raise UserError(
            "A rehearsal is for a GPU, got none, and this machine has none. Name one, such as --gpu rtx-4090; "
            "`lowmem-ft gpus` lists them."
        )
    return with_settings(recipe, {"training.use_cpu": False}), spec


def _refuse_without_tokenizer(recipe: Recipe) -> None:
    """Raise an error before anything is traced: unlike an estimate, a rehearsal reads the data."""
    try:
        load_tokenizer(recipe.model)
    except ModelError as error:
        raise ModelError(
            f"A rehearsal tokenizes the data, so it needs the model's tokenizer, though not its weights. {error} A "
            "folder with tokenizer.json and tokenizer_config.json will do, and needs no network."
        ) from error


def _folder_of(recipe: Recipe, instead: Path, warnings: list[str]) -> RunFolder:
    """Return another folder that resumes from the run's checkpoint; what would make the run fail is a warning."""
    resume_from = None
    try:
        resume_from = RunFolder.open(recipe).resume_from
    except UserError as error:
        warnings += [f"The run would be refused: {problem}" for problem in error.problems]
    return RunFolder(instead / "run", resume_from=resume_from, overwrite=False)


@collector_paused()
def _run(
    recipe: Recipe,
    gpu: Gpu,
    folder: RunFolder,
    steps: int | None,
    on_step: Callable[[int, int], None],
) -> tuple[RehearsedRun, VirtualGPU]:
    machine = VirtualGPU(gpu, check_streams=True)
    found: RehearsedRun | None = None
    # Races are part of the result, and end nothing.
    with (
        contextlib.suppress(RaceError),
        deterministic_kernels(recipe.training.full_determinism),
        machine,
    ):
        try:
            records = Records(machine)
            runtime = rehearsal_runtime(machine, recipe, records, on_step)
            with machine.during("load"):
                run = TrainingRun.build(recipe, folder, runtime)
                mark_weight_memory(run.session.techniques, machine)
            load_end = machine.work.position
            left, records.first_step = run.num_steps - run.progress.step, run.progress.step
            found = RehearsedRun(
                records=records,
                num_steps=left,
                copied_weight_bytes=copied_weight_bytes(run.session.techniques),
                vocabulary_size=vocab_size(run.session.unwrapped_model.config) or 0,
                load_end=load_end,
                num_held_out_sources=len(run.data.evaluation_by_source) or 1,
            )
            if steps is not None and steps > left:
                raise UserError(
                    f"--steps {steps} is more than the {left} steps of this run. Leave it out to rehearse all of them."
                )
            if steps is not None:
                run.num_steps = run.progress.step + steps
            run.train()
        except Interrupted as stop:
            raise KeyboardInterrupt("while rehearsing: nothing was written.") from stop
        finally:
            lift_cap(recipe.budget)
    assert found is not None, "races are reported at the end of the block"
    return found, machine


def _estimated(
    recipe: Recipe, gpu: Gpu, run: RehearsedRun, machine: VirtualGPU
) -> tuple[MemoryEstimate, Findings]:
    trace = machine.trace(recipe.model.name_or_path or "")
    findings = Findings(recipe, gpu, run, trace)
    longest = findings.longest
    traced = TracedRecipe(
        trace=trace,
        tokens_per_micro_batch=longest.tokens // longest.num_micro_batches,
        batch=f"at most {longest}",
        vocabulary_size=run.vocabulary_size,
        copied_weight_bytes=run.copied_weight_bytes,
    )
    estimate = estimate_of_trace(
        recipe, traced, gpu, recipe.budget, machine.trace_seconds, "", findings.replays
    )
    step = findings.mean_step(estimate)
    return dataclasses.replace(estimate, step=step, races=machine.races), findings


@contextlib.contextmanager
def _warnings_heard() -> Iterator[list[str]]:
    """Collect the warnings logged in a block for the report, instead of logging them."""
    heard: list[str] = []

    def hear(record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in heard:
            heard.append(message)

    with log_heard(logging.WARNING, hear), said_of_virtual_gpus():
        yield heard
