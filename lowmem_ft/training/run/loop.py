"""The training run: open the folder, build, step until done, evaluate, save.

Everything that the loop counts is in :class:`~lowmem_ft.training.folder.checkpoint_folders.Progress`, so that a
killed run resumes as if it had never stopped. A run ends in one of four ways: done (a model folder), because all steps
were taken or a callback asked to stop; interrupted by a signal (a checkpoint, whose path is in
:class:`~lowmem_ft.foundation.errors.Interrupted`); stopped because too many steps in a row were not finite; or with an
error, the user's or a callback's. A signal before the first step ends the process at once, as there is nothing to save.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lowmem_ft.foundation.errors import Interrupted, UserError
from lowmem_ft.foundation.out_of_memory_errors import library_that_did_not_start
from lowmem_ft.foundation.system.device_memory import read_device_memory
from lowmem_ft.foundation.system.interrupts import Interruption
from lowmem_ft.foundation.system.launch_variables import is_main_process
from lowmem_ft.foundation.upstream.tested import warn_if_untested
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.training.callbacks.callbacks import FAIL, STOP, check_callbacks
from lowmem_ft.training.callbacks.events import EvaluationEvent, SaveEvent, StepEvent
from lowmem_ft.training.callbacks.run_metrics import RunMetrics
from lowmem_ft.training.checkpoints.run_checkpoints import RunCheckpoints
from lowmem_ft.training.evaluation.best_model import BestModel
from lowmem_ft.training.evaluation.held_out_loss import EvaluationResult
from lowmem_ft.training.evaluation.run_evaluations import RunEvaluations
from lowmem_ft.training.export.model_card import model_card
from lowmem_ft.training.export.saving_finished_model import save_finished_model
from lowmem_ft.training.export.train_result import TrainResult
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.out_of_memory.diagnosis import does_not_fit_here, report_of
from lowmem_ft.training.out_of_memory.error import is_out_of_memory, not_retried
from lowmem_ft.training.out_of_memory.retry import Retries
from lowmem_ft.training.processes.error_propagation import ending_together
from lowmem_ft.training.run.health import RunHealth, SuspectWeightsError, weights_not_finite
from lowmem_ft.training.run.preflight import Preflight
from lowmem_ft.training.run.profiled_steps import ProfiledSteps
from lowmem_ft.training.run.progress import ProgressDisplay
from lowmem_ft.training.run.run_parts import RunParts
from lowmem_ft.training.run.start import log_start, write_sources
from lowmem_ft.training.run.time_left import TimeLeft
from lowmem_ft.training.run.unplanned import refuse_unplanned
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.budget_cap import lift_cap
from lowmem_ft.training.step.deterministic_kernels import deterministic_kernels

logger = logging.getLogger(__name__)


def train(
    recipe: Recipe,
    folder: RunFolder | None = None,
    runtime: Runtime | None = None,
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
        Interrupted: after SIGINT (Ctrl-C), SIGTERM, SIGHUP or SIGUSR1, once a checkpoint (or the finished model) is
            saved.
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
    runtime: Runtime | None,
    preflight: Preflight | None,
    callbacks: Sequence[object],
) -> TrainResult:
    run: TrainingRun | None = None
    if is_main_process():
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
        process_index = run.runtime.ranks.process_index
        report = report_of(
            error, run.session, run.folder.path, run.checkpoints.last, process_index=process_index
        )
        when = f"after {run.progress.step} steps"
        raise does_not_fit_here(recipe, when, run.runtime, report) from error
    finally:
        lift_cap(recipe.budget)


@dataclass(kw_only=True)
class TrainingRun(RunParts):
    """A run that is ready to step, with everything that its parts share; :meth:`build` makes one from a recipe."""

    def __post_init__(self) -> None:
        """Create the run's own parts; their state is that of its checkpoint, if it resumes from one."""
        self.interruption = Interruption()
        self.metrics = RunMetrics(self.folder, self.runtime.ranks, self.runtime.files)
        self.checkpoints = RunCheckpoints(
            self.folder.path,
            self.session,
            self.runtime,
            self.tokenizer,
            self.progress,
            keep=self.recipe.training.save_total_limit,
            last=self.folder.resume_from,
        )
        self.retries = Retries(self.session, self.recipe)
        self.retries.apply(self.progress.cut)
        self.best = BestModel(self.recipe.training, self.folder, self.progress)
        self.evaluations = RunEvaluations(
            self.recipe,
            self.data,
            self.session,
            self.runtime,
            self.generations,
            self.progress,
            self.best,
            self.metrics,
            self._has_signal,
        )
        self.evaluated: EvaluationResult | None = None
        self.health = RunHealth(self.recipe, self.folder, self.progress, self.runtime.ranks)
        self.profiled = ProfiledSteps(self)
        config, evaluates = self.recipe.training, bool(self.evaluations)
        self.time_left = TimeLeft(
            num_steps=self.num_steps,
            step=self.progress.step,
            eval_steps=config.eval_steps if evaluates else None,
            save_steps=config.save_steps,
            evaluates_at_end=evaluates,
        )

    def train(self) -> TrainResult:
        """Run all steps, evaluations and checkpoints, then save the finished model."""
        self.runtime.ranks.wait_for_everyone()  # until all have read the folder
        succeeded = False
        try:
            with self.runtime.ranks.failing_together():
                if self.runtime.ranks.is_main:
                    self.folder.start(self.recipe, self.progress)
                    self.memory.continue_from(self.folder.read_metrics())
                    self.memory.write_estimate(self.metrics, self.progress.step)
                    write_sources(self.data, self.metrics, self.progress.step)
                    if self.best.is_earlier:
                        self.best.checkpoint()  # before hours of training: it may be gone
            self.runtime.files.start_trackers(self.recipe)
            log_start(self.recipe, self.runtime, self.progress, self.num_steps)
            with self.interruption:
                result = self._finish(self._take_steps())
            succeeded = True
            return result
        except KeyboardInterrupt as stop:
            stop.args = stop.args or (self.checkpoints.left_behind(),)
            raise
        except SuspectWeightsError:
            self.health.set_aside_checkpoints()
            raise
        finally:
            if self.runtime.ranks.is_main:
                self.folder.end(succeeded=succeeded)

    def _take_steps(self) -> EvaluationResult | None:
        """Train to the last step, then evaluate if there is held-out data."""
        config = self.recipe.training
        display = ProgressDisplay(
            num_steps=self.num_steps,
            step=self.progress.step,
            logging_steps=config.logging_steps,
            time_left=self.time_left,
            console=self.runtime.files.console,
        )
        with display, self.profiled:
            self._evaluate_if_due()
            self._handle_request(self._requested()[1])
            while self.progress.step < self.num_steps:
                with self.profiled.during(self.progress.step + 1), self.time_left.during("step"):
                    record = self.step()
                display.update(record)
                self.callbacks.tell(StepEvent.of(record, self.num_steps))
                self._evaluate_if_due()
                if _is_due(self.progress.step, config.save_steps) and not self.checkpoints.has_step:
                    self._save_checkpoint()
                self._stop_if_requested()
            result = self.evaluated or self._evaluate()
            self._handle_request(self._requested()[1])
            return result

    def step(self) -> dict[str, Any]:
        """Take one optimizer step, count it, and write its metrics."""
        start = time.perf_counter()
        window, self.evaluated = self.stream.next_window(), None
        learning_rate = float(self.session.scheduler.get_last_lr()[0])
        with self.memory.during("step"):
            result = self.runtime.values.take_step(window.batches, self.retries.train_step)
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
        num_tokens = sum(batch.input_ids_BT.numel() for batch in window.batches)
        self.memory.after_step(
            session.unwrapped_model, session.optimizer, session.techniques, step_seconds, num_tokens
        )
        memory = read_device_memory(self.runtime.machine.device)
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
        if not self.evaluations:
            return None
        with self.memory.during("evaluation"), self.time_left.during("evaluation"):
            found = self.evaluations.evaluate(loss=loss)
        if found is None:
            self._stop_if_requested()
        assert found is not None, "only a signal can end an evaluation without a result"
        is_new, self.evaluated = self.evaluations.keep(found), found.result
        if found.result is not None and is_new:
            event = EvaluationEvent.of(self.progress, found.result.loss, found.result.num_label_tokens)
            self.callbacks.tell(event)
        return found.result

    def _has_signal(self) -> bool:
        """Return whether this process has received a signal."""
        return self.interruption.signal_number != 0

    def _save_checkpoint(self) -> None:
        step = self.progress.step
        self.health.refuse_ruined_weights(self.session)
        with self.memory.during("save"), self.time_left.during("save"):
            checkpoint = self.checkpoints.save()
        if step < self.num_steps:  # the end of the run writes it once the model is saved, too
            self.memory.write_measured(self.metrics, step)
        logger.info("Saved %s.", checkpoint)
        self.callbacks.tell(SaveEvent(step=step, checkpoint=checkpoint))

    def _stop_if_requested(self) -> None:
        """End the run here, in all processes, if one has received a signal, or a callback asks for it or has failed."""
        number, wish = self._requested()
        if number:
            self._interrupt(number)
        self._handle_request(wish)

    def _handle_request(self, wish: int) -> None:
        """End the run here if a callback asks for it, or with the exception of one, once this step has a checkpoint."""
        if wish == FAIL:
            if not self.checkpoints.has_step:
                self._save_checkpoint()
            self.runtime.files.end_trackers()
            self.callbacks.raise_error()
        if wish == STOP and self.progress.step < self.num_steps:
            self.num_steps = self.time_left.num_steps = self.progress.step
            if self.callbacks.stop is not None:
                logger.info("The run ends at step %d. %s", self.num_steps, self.callbacks.stop.reason)

    def _interrupt(self, number: int) -> None:
        """Save a checkpoint unless this step has one, and leave."""
        if not self.checkpoints.has_step:
            self._save_checkpoint()
        if self.progress.step == self.num_steps:
            self.memory.write_measured(self.metrics, self.progress.step)
        self.runtime.files.end_trackers()
        raise Interrupted(number, checkpoint=self.checkpoints.last)

    def _requested(self) -> tuple[int, int]:
        """Return the number of the signal that any process has received, 0 if none has, and the callbacks' wish."""
        here = self.interruption.signal_number * (FAIL + 1) + self.callbacks.wish
        return divmod(self.runtime.ranks.max(here), FAIL + 1)

    def _finish(self, evaluation: EvaluationResult | None) -> TrainResult:
        ranks = self.runtime.ranks
        problems = self.health.problems_at_the_end(weights_not_finite(self.session, ranks), evaluation)
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
                generations=self.generations.before_and_after(self.best.step) if ranks.is_main else (),
            )
            save_finished_model(
                self.session,
                ranks,
                self.runtime.files,
                self.tokenizer,
                self.folder,
                self.recipe,
                best=self.best,
                readme=readme,
                upload=upload,
            )
            if not problems:
                self.checkpoints.delete_old()  # a process killed after its last save may have left some
                logger.info("Saved %s.", self.folder.model_folder)
        self.budget_watch.report(file_bytes=self.session.host_memory.peak_file_bytes)
        self.memory.write_measured(self.metrics, progress.step)
        stop, best_step = self.callbacks.stop, self.best.step
        stopped = stop and stop.reason
        self.metrics.write({"step": progress.step, "best_step": best_step, "stopped": stopped})
        number, _ = self._requested()
        self.runtime.files.end_trackers()
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
