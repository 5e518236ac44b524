"""The training run: open the folder, build, step until done, evaluate, save.

Everything that the loop counts is in :class:`~lowmem_ft.training.checkpoints.checkpoint_folders.Progress`, so that a
killed run resumes as if it had never stopped. A run ends in one of four ways: done (a model folder), because all steps
were taken or a callback asked to stop; interrupted by a signal (a checkpoint, whose path is in
:class:`~lowmem_ft.foundation.errors.Interrupted`); stopped because too many steps in a row were not finite; or with an
error, the user's or a callback's. A signal before the first step ends the process at once, as there is nothing to save.
"""

from __future__ import annotations

import logging
import math
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from lowmem_ft.data.batches.stream import DataStream, eval_batches
from lowmem_ft.data.epoch_rows import Examples
from lowmem_ft.data.loading import PreparedData
from lowmem_ft.foundation.errors import Interrupted, UserError
from lowmem_ft.foundation.out_of_memory_errors import library_that_did_not_start
from lowmem_ft.models.loading import load_tokenizer
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.system.memory_meter import read_device_memory
from lowmem_ft.system.signals import Interruption
from lowmem_ft.training.build import build_session, plan_session, resumed
from lowmem_ft.training.callbacks.callbacks import FAIL, STOP, Callbacks, callbacks_of_run, check_callbacks
from lowmem_ft.training.callbacks.events import EvaluationEvent, SaveEvent, StepEvent
from lowmem_ft.training.causality_check import refuse_bidirectional_weights, refuse_leaking_documents
from lowmem_ft.training.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from lowmem_ft.training.checkpoints.checkpoint_folders import Progress, delete_old_checkpoints
from lowmem_ft.training.deterministic_kernels import deterministic_kernels
from lowmem_ft.training.distributed.error_propagation import ending_together
from lowmem_ft.training.distributed.launch import Launch, as_launched
from lowmem_ft.training.distributed.process_group import join_processes
from lowmem_ft.training.evaluation import EvaluationInPieces, EvaluationResult, evaluate, together
from lowmem_ft.training.export.finished_model import save_finished_model
from lowmem_ft.training.export.hub_upload import check_upload
from lowmem_ft.training.export.model_card import model_card
from lowmem_ft.training.export.train_result import TrainResult
from lowmem_ft.training.generation.run_generations import RunGenerations
from lowmem_ft.training.out_of_memory.budget_cap import BudgetWatch, apply_budget, lift_cap
from lowmem_ft.training.out_of_memory.diagnosis import does_not_fit_here, report_of
from lowmem_ft.training.out_of_memory.error import is_out_of_memory, not_retried
from lowmem_ft.training.out_of_memory.retry import Retries
from lowmem_ft.training.preflight import Preflight, PreflightChecks
from lowmem_ft.training.profiling.profiled_steps import ProfiledSteps
from lowmem_ft.training.run.best_model import BestModel
from lowmem_ft.training.run.changed_recipe import refuse_other_kernels
from lowmem_ft.training.run.health import RunHealth, SuspectWeightsError, weights_not_finite
from lowmem_ft.training.run.progress import ProgressDisplay
from lowmem_ft.training.run.random_seed import seed_generators
from lowmem_ft.training.run.run_folder import RunFolder
from lowmem_ft.training.run.run_memory import RunMemory
from lowmem_ft.training.run.run_metrics import RunMetrics
from lowmem_ft.training.run.start import (
    log_start,
    num_training_steps,
    progress_at,
    read_data,
    stream_from,
    write_sources,
)
from lowmem_ft.training.run.time_left import TimeLeft
from lowmem_ft.training.run.unplanned import refuse_unplanned
from lowmem_ft.training.run_runtime import RunRuntime
from lowmem_ft.training.session import Session
from lowmem_ft.upstream.tested import warn_if_untested

logger = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    folder: RunFolder | None = None,
    runtime: RunRuntime | None = None,
    preflight: Preflight | None = None,
    *,
    callbacks: Sequence[object] = (),
) -> TrainResult:
    """Train a recipe from scratch or from a checkpoint, and save the model.

    Args:
        recipe: see :func:`lowmem_ft.load_recipe`.
        folder: the result of :meth:`RunFolder.open` for the recipe; None: opened here.
        runtime: the device and the processes; None: those of ``accelerate launch``, or one process on this machine.
        preflight: estimates the run before its weights are read, as in ``lowmem_ft.train``; None: there is no estimate.
        callbacks: see ``lowmem_ft.train``.

    Returns:
        The folders of the run and how it ended.

    Raises:
        UserError: if the recipe, its model, its data or the folder cannot be used, or the result is not finite.
        OtherProcessError: if another process of the run has failed or disappeared.
        DoesNotFitError: if the device's memory runs out, or is estimated to; says what would need less.
        Interrupted: after SIGINT (Ctrl-C) or SIGTERM, once a checkpoint (or the finished model) is saved.
        KeyboardInterrupt: after SIGINT before the first step, or after a second one while the current step finishes.
    """
    check_recipe(recipe)
    check_callbacks(callbacks)
    refuse_unplanned(recipe)
    with deterministic_kernels(recipe.training.full_determinism), ending_together():
        return _train(recipe, folder, runtime, preflight, callbacks)


def _train(
    recipe: Recipe,
    folder: RunFolder | None,
    runtime: RunRuntime | None,
    preflight: Preflight | None,
    callbacks: Sequence[object],
) -> TrainResult:
    run: TrainingRun | None = None
    warn_if_untested()
    try:
        run = TrainingRun.build(recipe, folder, runtime, preflight, callbacks)
        return run.train()
    except (RuntimeError, MemoryError) as error:
        if (why := library_that_did_not_start(error)) is not None:
            raise UserError(why) from error
        if not is_out_of_memory(error):
            raise
        if run is None:
            raise does_not_fit_here(recipe, "while the model was loaded", runtime) from error
        process_index = run.runtime.process_index
        report = report_of(error, run.session, run.folder.path, run.checkpoint, process_index=process_index)
        when = f"after {run.progress.step} steps"
        raise does_not_fit_here(recipe, when, run.runtime, report) from error
    finally:
        lift_cap(recipe.budget)


@dataclass(kw_only=True)
class TrainingRun:
    """A run that is ready to step, with everything that its parts share; :meth:`build` makes one from a recipe.

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
    runtime: RunRuntime
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

    def __post_init__(self) -> None:
        """Create the run's own parts; their state is that of its checkpoint, if it resumes from one."""
        self.interruption = Interruption()
        self.metrics = RunMetrics(self.folder, self.runtime)
        self.checkpoint = self.folder.resume_from
        self.saved_step = self.progress.step
        self.retries = Retries(self.session, self.recipe)
        self.retries.apply(self.progress.cut)
        self.evaluation = EvaluationInPieces(may_cut=self.recipe.budget.retry)
        self.evaluated: EvaluationResult | None = None
        self.best = BestModel(self.recipe.training, self.folder, self.progress)
        self.health = RunHealth(self.recipe, self.folder, self.progress, self.runtime)
        self.profiled = ProfiledSteps(self)
        config = self.recipe.training
        evaluates = self.data.evaluation is not None or bool(self.generations)
        self.time_left = TimeLeft(
            num_steps=self.num_steps,
            step=self.progress.step,
            eval_steps=config.eval_steps if evaluates else None,
            save_steps=config.save_steps,
            evaluates_at_end=evaluates,
        )

    @classmethod
    def build(
        cls,
        recipe: Recipe,
        folder: RunFolder | None = None,
        runtime: RunRuntime | None = None,
        preflight: Preflight | None = None,
        callbacks: Sequence[object] = (),
    ) -> TrainingRun:
        """Tokenize the data, load the model, and restore the folder's checkpoint.

        Args:
            recipe: see :func:`train`.
            folder: see :func:`train`; None: opened here.
            runtime: see :func:`train`; None: made here.
            preflight: see :func:`train`; None: the run is not estimated.
            callbacks: see :func:`train`.

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
            launched = as_launched(recipe, Launch(num_processes=runtime.num_processes))
        seed_generators(config)
        resume_from = folder.resume_from
        with runtime.failing_together():
            apply_budget(
                recipe.budget,
                runtime.device,
                host=runtime.host,
                uses_bitsandbytes=recipe.uses_bitsandbytes,
                num_processes=runtime.num_processes,
                num_processes_here=runtime.num_processes_here,
            )
            budget_watch = BudgetWatch(
                recipe.budget, runtime.device, runtime.num_processes_here, runtime.host
            )
            built = launched if resume_from is None else resumed(launched, resume_from)
            plan = plan_session(built, runtime)
            tokenizer = load_tokenizer(built.model)
        checks = PreflightChecks(preflight, built, runtime)
        checks.before_data()
        data = read_data(built, runtime, tokenizer, plan)
        memory = RunMemory(runtime.device)
        memory.estimate = checks.after_data(data)
        with runtime.failing_together():
            progress = progress_at(resume_from, recipe, data)
            stream = stream_from(recipe, runtime, data, progress.position)
            num_steps = num_training_steps(recipe, stream, progress, resume_from)
        generations = RunGenerations.of(recipe, runtime, folder.path, data, tokenizer)
        with memory.during("load"):
            in_pieces = progress.cut.max_tokens is not None
            session = build_session(built, runtime, plan, num_training_steps=num_steps, in_pieces=in_pieces)
            refuse_bidirectional_weights(session, recipe.model.name_or_path or "")
            if recipe.data.packing:
                refuse_leaking_documents(session, recipe.model.name_or_path or "")
            # Loading and wrapping may draw random numbers; dropout must not depend on how many they draw.
            seed_generators(config, runtime.process_index)
            if resume_from is not None:
                refuse_other_kernels(recipe, resume_from, session.techniques.kernels())
                load_checkpoint(resume_from, session, runtime)
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
            callbacks=callbacks_of_run(callbacks, config.early_stopping_patience, progress, runtime),
            generations=generations,
        )

    def train(self) -> TrainResult:
        """Run all steps, evaluations and checkpoints, then save the finished model."""
        self.runtime.wait_for_everyone()  # until all have read the folder
        succeeded = False
        try:
            with self.runtime.failing_together():
                if self.runtime.is_main:
                    self.folder.start(self.recipe, self.progress)
                    self.memory.continue_from(self.folder.read_metrics())
                    self.memory.write_estimate(self.metrics, self.progress.step)
                    write_sources(self.data, self.metrics, self.progress.step)
                    if self.best.is_earlier:
                        self.best.checkpoint()  # before hours of training: it may be gone
            self.runtime.start_trackers(self.recipe)
            log_start(self.recipe, self.runtime, self.progress, self.num_steps)
            with self.interruption:
                result = self._finish(self._take_steps())
            succeeded = True
            return result
        except KeyboardInterrupt as stop:
            stop.args = stop.args or (self._left_behind(),)
            raise
        except SuspectWeightsError:
            self.health.set_aside_checkpoints()
            raise
        finally:
            if self.runtime.is_main:
                self.folder.end(succeeded=succeeded)

    def _take_steps(self) -> EvaluationResult | None:
        """Train to the last step, then evaluate if there is held-out data."""
        config = self.recipe.training
        display = ProgressDisplay(
            num_steps=self.num_steps,
            step=self.progress.step,
            logging_steps=config.logging_steps,
            time_left=self.time_left,
            console=self.runtime.progress_console,
        )
        with display, self.profiled:
            self._evaluate_if_due()
            self._heed(self._asked()[1])
            while self.progress.step < self.num_steps:
                with self.profiled.during(self.progress.step + 1), self.time_left.during("step"):
                    record = self.step()
                display.update(record)
                self.callbacks.tell(StepEvent.of(record, self.num_steps))
                self._evaluate_if_due()
                if _is_due(self.progress.step, config.save_steps) and self.saved_step != self.progress.step:
                    self._save_checkpoint()
                self._stop_if_asked()
            result = self.evaluated or self._evaluate()
            self._heed(self._asked()[1])
            return result

    def step(self) -> dict[str, Any]:
        """Take one optimizer step, count it, and write its metrics."""
        start = time.perf_counter()
        window, self.evaluated = self.stream.next_window(), None
        learning_rate = float(self.session.scheduler.get_last_lr()[0])
        with self.memory.during("step"):
            result = self.runtime.take_step(window.batches, self.retries.train_step)
        self.progress.step += 1
        self.progress.position = window.position
        self.progress.tokens += result.num_tokens
        self.progress.cut = self.retries.cut
        sample_ids = [sample for batch in window.batches for sample in batch.sample_ids]
        self.progress.loss = result.loss
        self.health.after_step(self.session, result, sample_ids, learning_rate)
        seconds = time.perf_counter() - start
        session = self.session
        is_profiled = self.profiled.is_due(self.progress.step)
        step_seconds = None if is_profiled else seconds
        self.memory.after_step(session.unwrapped_model, session.optimizer, session.techniques, step_seconds)
        memory = read_device_memory(self.runtime.device)
        self.budget_watch.after_step(file_bytes=self.session.host_memory.peak_file_bytes)
        record = {
            "step": self.progress.step,
            "epoch": round(window.epoch, 4),
            "loss": self.progress.loss,
            "learning_rate": learning_rate,
            "grad_norm": result.grad_norm,
            "tokens": self.progress.tokens,
            "tokens_per_second": result.num_tokens / seconds,
            "memory_now_bytes": memory.now_bytes,
            "memory_peak_bytes": memory.peak_bytes,
            "skipped_steps": self.progress.skipped_steps,
        }
        if is_profiled:
            record["profiled"] = True
        if result.aux_loss is not None:
            record["aux_loss"] = result.aux_loss
        record |= self.retries.metrics()
        is_due = _is_due(self.progress.step, self.recipe.training.logging_steps)
        if is_due:
            record |= self.session.techniques.metrics()
        self.metrics.write(record, to_trackers=is_due)
        return record

    def _evaluate_if_due(self) -> None:
        """Evaluate if this step is due and was not evaluated before an interruption; not after the last step."""
        step, config = self.progress.step, self.recipe.training
        is_due = config.eval_on_start if step == 0 else _is_due(step, config.eval_steps)
        if step == 0 and self.generations and not is_due:
            self._evaluate(loss=False)
        if is_due and step < self.num_steps and self.progress.evaluated_step != step:
            result = self._evaluate()
            if result is not None and not math.isfinite(result.loss):
                self.health.refuse_ruined_weights(self.session)
                logger.warning("The held-out loss of step %d is not finite, though all weights are.", step)
            if self.best.is_current:
                self._save_checkpoint()

    def _evaluate(self, *, loss: bool = True) -> EvaluationResult | None:
        """Evaluate on held-out data and answer prompts, if there are any, and write it down; a signal cuts it short."""
        if self.data.evaluation is None and not self.generations:
            return None
        loss = loss and self.data.evaluation is not None
        with self.memory.during("evaluation"), self.time_left.during("evaluation"):
            result, answers = self._held_out_result() if loss else None, None
            if result is not None or not loss:
                answers = self.generations.answers(self.session, self.progress.step, self._has_signal)
        if answers is None:
            self._stop_if_asked()
        assert answers is not None, "only a signal can end an evaluation without a result"
        progress, self.evaluated = self.progress, result
        is_new, progress.evaluated_step = progress.evaluated_step != progress.step, progress.step
        if result is not None:
            if is_new:  # a run that was stopped right after its last evaluation makes it again
                self.best.compare(result)
            self.metrics.write({"step": progress.step, **result.record()}, to_trackers=True)
            best_so_far = ", the best so far" if self.best.is_current else ""
            logger.info("Step %d: %s%s.", progress.step, result, best_so_far)
        self.generations.write(answers)
        if result is not None and is_new:
            self.callbacks.tell(EvaluationEvent.of(progress, result.loss, result.num_label_tokens))
        return result

    def _held_out_result(self) -> EvaluationResult | None:
        """Evaluate on the held-out data, source by source; None if a signal cut it short."""
        if not (by_source := self.data.evaluation_by_source):
            assert self.data.evaluation is not None, "callers have looked"
            return self._evaluated(self.data.evaluation)
        results = {name: self._evaluated(examples) for name, examples in by_source.items()}
        finished = {name: one for name, one in results.items() if one is not None}
        return together(finished) if len(finished) == len(results) else None

    def _evaluated(self, examples: Examples) -> EvaluationResult | None:
        """Evaluate on some held-out examples; None if a signal cut it short."""
        config = self.recipe.training
        batches = eval_batches(
            examples,
            batch_size=config.per_device_eval_batch_size or config.per_device_train_batch_size,
            num_processes=self.runtime.num_processes,
            process_index=self.runtime.process_index,
            collate=self.data.collate,
        )
        return evaluate(
            self.session,
            self.runtime,
            self.runtime.to_evaluate(batches),
            in_pieces=self.evaluation,
            interrupted=self._has_signal,
        )

    def _has_signal(self) -> bool:
        """Return whether this process has received a signal."""
        return self.interruption.signal_number != 0

    def _save_checkpoint(self) -> None:
        step = self.progress.step
        self.health.refuse_ruined_weights(self.session)
        with (
            self.memory.during("save"),
            self.time_left.during("save"),
            not_retried(f"It ran out while the checkpoint of step {step} was saved."),
        ):
            self.checkpoint = save_checkpoint(
                self.folder.path, self.session, self.runtime, self.tokenizer, self.progress
            )
        self.saved_step = self.progress.step
        self._delete_old_checkpoints()
        if step < self.num_steps:  # the end of the run writes it once the model is saved, too
            self.memory.write_measured(self.metrics, step)
        logger.info("Saved %s.", self.checkpoint)
        self.callbacks.tell(SaveEvent(step=step, checkpoint=self.checkpoint))

    def _delete_old_checkpoints(self) -> None:
        """Delete old checkpoints, except while steps are being skipped: they may be the only good ones."""
        if self.runtime.is_main and not self.progress.skipped_in_a_row:
            keep, best = self.recipe.training.save_total_limit, self.progress.best
            step = self.progress.step
            delete_old_checkpoints(self.folder.path, keep, step=step, best=best and best.step)

    def _stop_if_asked(self) -> None:
        """End the run here, in all processes, if one has received a signal, or a callback asks for it or has failed."""
        number, wish = self._asked()
        if number:
            self._interrupt(number)
        self._heed(wish)

    def _heed(self, wish: int) -> None:
        """End the run here if a callback asks for it, or with the exception of one, once this step has a checkpoint."""
        if wish == FAIL:
            if self.saved_step != self.progress.step:
                self._save_checkpoint()
            self.runtime.end_trackers()
            self.callbacks.raise_error()
        if wish == STOP and self.progress.step < self.num_steps:
            self.num_steps = self.time_left.num_steps = self.progress.step
            if self.callbacks.stop is not None:
                logger.info("The run ends at step %d. %s", self.num_steps, self.callbacks.stop.reason)

    def _interrupt(self, number: int) -> None:
        """Save a checkpoint unless this step has one, and leave."""
        if self.saved_step != self.progress.step:
            self._save_checkpoint()
        if self.progress.step == self.num_steps:
            self.memory.write_measured(self.metrics, self.progress.step)
        self.runtime.end_trackers()
        raise Interrupted(number, checkpoint=self.checkpoint)

    def _left_behind(self) -> str:
        """Describe the last checkpoint after a second signal, or one before the first step, which end a run at once."""
        if self.checkpoint is None:
            return f"at step {self.progress.step}: no checkpoint was saved."
        setting = shlex.quote(f"training.resume_from_checkpoint={self.checkpoint}")
        return f"at step {self.progress.step}. Saved before: {self.checkpoint}; resume with {setting}."

    def _asked(self) -> tuple[int, int]:
        """Return the number of the signal that any process has received, 0 if none has, and the callbacks' wish."""
        here = self.interruption.signal_number * (FAIL + 1) + self.callbacks.wish
        return divmod(self.runtime.max_over_processes(here), FAIL + 1)

    def _finish(self, evaluation: EvaluationResult | None) -> TrainResult:
        problems = self.health.problems_at_the_end(weights_not_finite(self.session, self.runtime), evaluation)
        evaluation = self.best.evaluation(evaluation)
        if self.best.is_earlier and problems:
            logger.warning(
                "This is not true of the finished model, which is the best: %s", " ".join(problems)
            )
            problems = []
        self.session.close()
        in_vain = not_retried("It ran out while the finished model was saved.")
        with self.memory.during("save"), in_vain:
            progress, upload = self.progress, self.recipe.training.push_to_hub and not problems
            readme = model_card(
                self.recipe,
                steps=progress.step,
                tokens=progress.tokens,
                loss=progress.loss,
                evaluation=evaluation,
                best_step=self.best.step,
                memory=self.memory.rows(),
                generations=self.generations.before_and_after() if self.runtime.is_main else (),
            )
            save_finished_model(
                self.session,
                self.runtime,
                self.tokenizer,
                self.folder,
                self.recipe,
                best=self.best,
                readme=readme,
                upload=upload,
            )
            if not problems:
                self._delete_old_checkpoints()  # a process killed after its last save may have left some
                logger.info("Saved %s.", self.folder.model_folder)
        self.budget_watch.report(file_bytes=self.session.host_memory.peak_file_bytes)
        self.memory.write_measured(self.metrics, progress.step)
        stop, best_step = self.callbacks.stop, self.best.step
        stopped = stop and stop.reason
        self.metrics.write({"step": progress.step, "best_step": best_step, "stopped": stopped})
        number, _ = self._asked()
        self.runtime.end_trackers()
        self.health.refuse_unhealthy_end(problems, evaluation)
        if number:
            raise Interrupted(number, model_folder=self.folder.model_folder)
        return TrainResult(
            model_folder=self.folder.model_folder,
            output_dir=self.folder.path,
            steps=self.progress.step,
            loss=math.nan if self.progress.loss is None else self.progress.loss,
            evaluation=evaluation,
            best_step=best_step,
            stopped=stopped,
        )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
