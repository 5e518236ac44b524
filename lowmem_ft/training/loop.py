"""The training run: open the folder, build, step until done, evaluate, save.

Everything that the loop counts is in :class:`~lowmem_ft.training.checkpoint.Progress`, so that a run that was killed
goes on as if it had not been. A run ends in one of four ways: done (a model folder), interrupted by a signal (a
checkpoint and exit code 128 + signal), stopped because step after step was not finite, or with a user error.
"""

from __future__ import annotations

import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, set_seed

from lowmem_ft.data import DataPosition, DataStream, PreparedData, eval_batches, load_data
from lowmem_ft.errors import DataError, UserError
from lowmem_ft.memory.meter import read_device_memory, read_host_memory
from lowmem_ft.models import load_tokenizer, max_positions
from lowmem_ft.recipe import Recipe, check_recipe
from lowmem_ft.training.budget_cap import apply_budget, report_budget
from lowmem_ft.training.build import build_session, plan_session
from lowmem_ft.training.checkpoint import (
    Progress,
    delete_old_checkpoints,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from lowmem_ft.training.evaluation import EvaluationResult, evaluate
from lowmem_ft.training.finished_model import save_finished_model
from lowmem_ft.training.interruption import Interruption
from lowmem_ft.training.progress import ProgressDisplay
from lowmem_ft.training.run_folder import RunFolder
from lowmem_ft.training.runtime import AccelerateRuntime
from lowmem_ft.training.session import Session
from lowmem_ft.training.step import StepResult, train_step

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a finished run leaves behind.

    Args:
        model_folder: the trained model; ``from_pretrained`` loads it.
        output_dir: the run folder.
        steps: optimizer steps taken in all, resumed ones included.
        loss: training loss of the last step, in nats per label token.
        evaluation: on the held-out data at the end, if the recipe has any.
    """

    model_folder: Path
    output_dir: Path
    steps: int
    loss: float
    evaluation: EvaluationResult | None


def train(recipe: Recipe) -> TrainResult:
    """Train what the recipe says, from a fresh start or from a checkpoint, and save the model.

    Args:
        recipe: see :func:`lowmem_ft.load_recipe`.

    Returns:
        Where everything lies and how it ended.

    Raises:
        UserError: if the recipe, its model, its data or the folder cannot be used, or nothing finite comes out.
        SystemExit: after SIGINT (130) or SIGTERM (143), once a checkpoint is saved.
    """
    check_recipe(recipe)
    with Interruption() as interruption:
        return TrainingRun(recipe, interruption).train()


class TrainingRun:
    """One call of :func:`train`: what its parts share."""

    def __init__(self, recipe: Recipe, interruption: Interruption) -> None:
        config = recipe.training
        self.recipe = recipe
        self.interruption = interruption
        self.folder = RunFolder.open(recipe)
        self.runtime = AccelerateRuntime.create(config, self.folder.path)
        set_seed(config.seed, deterministic=config.full_determinism)
        apply_budget(recipe.budget, self.runtime.device)
        plan = plan_session(recipe, self.runtime)
        self.tokenizer: PreTrainedTokenizerBase = load_tokenizer(recipe.model)
        with (
            self.runtime.accelerator.main_process_first()
        ):  # the others find what it has tokenized in the cache
            self.data: PreparedData = load_data(
                recipe.data,
                self.tokenizer,
                max_positions=max_positions(plan.hf_config),
                seed=config.seed,
                attn_implementation=plan.attention.implementation,
            )
        if self.folder.resume_from is None:
            self.progress = Progress(position=DataPosition(seed=config.seed))
        else:
            self.progress = read_progress(self.folder.resume_from)
        self.stream = DataStream(
            self.data.train,
            position=self.progress.position,
            per_device_batch_size=config.per_device_train_batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            num_processes=self.runtime.num_processes,
            process_index=self.runtime.process_index,
            collate=self.data.collate,
        )
        self.num_steps = self._num_training_steps()
        self.session: Session = build_session(
            recipe, self.runtime, plan, num_training_steps=self.num_steps, resume_from=self.folder.resume_from
        )
        # Loading and wrapping may draw random numbers; dropout must not depend on how many.
        set_seed(config.seed + self.runtime.process_index, deterministic=config.full_determinism)
        if self.folder.resume_from is not None:
            load_checkpoint(self.folder.resume_from, self.session, self.runtime)
            logger.info("Going on from %s at step %d.", self.folder.resume_from, self.progress.step)
        self.last_record: dict[str, Any] = {}

    def train(self) -> TrainResult:
        """Steps, evaluations and checkpoints, then the finished model."""
        self.runtime.wait_for_everyone()
        if self.runtime.is_main:
            self.folder.start(self.recipe, self.progress.step)
        self.runtime.start_trackers(self.recipe)
        self._log_start()
        config = self.recipe.training
        evaluation = None
        display = ProgressDisplay(
            num_steps=self.num_steps,
            step=self.progress.step,
            logging_steps=config.logging_steps,
            enabled=self.runtime.is_main,
        )
        with display:
            if config.eval_on_start and self.progress.step == 0:
                self._evaluate()
            while self.progress.step < self.num_steps:
                display.update(self.step())
                step = self.progress.step
                if _is_due(step, config.eval_steps) and step < self.num_steps:
                    self._evaluate()
                if _is_due(step, config.save_steps):
                    self._save_checkpoint()
                self._stop_if_interrupted()
            evaluation = self._evaluate()
            self._stop_if_interrupted()
        return self._finish(evaluation)

    def step(self) -> dict[str, Any]:
        """One optimizer step, counted and written down."""
        start = time.perf_counter()
        window = self.stream.next_window()
        learning_rate = self.session.scheduler.get_last_lr()[0]
        result = train_step(self.session, window.batches)
        self.progress.step += 1
        self.progress.position = window.position
        self.progress.tokens += result.num_tokens
        sample_ids = [sample for batch in window.batches for sample in batch.sample_ids]
        self._count_skipped(result, sample_ids)
        seconds = time.perf_counter() - start
        memory = read_device_memory(self.runtime.device)
        record = {
            "step": self.progress.step,
            "epoch": round(window.epoch, 4),
            "loss": float(result.loss),
            "learning_rate": learning_rate,
            "grad_norm": float(result.grad_norm),
            "tokens": self.progress.tokens,
            "tokens_per_second": result.num_tokens / seconds,
            "memory_now_bytes": memory.now_bytes,
            "memory_peak_bytes": memory.peak_bytes,
            "skipped_steps": self.progress.skipped_steps,
        }
        is_due = _is_due(self.progress.step, self.recipe.training.logging_steps)
        if self.session.lost_updates is not None and is_due:
            record["lost_updates"] = self.session.lost_updates.fraction
        self._write(record, to_trackers=is_due)
        self.last_record = record
        return record

    def _count_skipped(self, result: StepResult, sample_ids: list[int]) -> None:
        """Name the examples of a step that was skipped, and give up after too many in a row."""
        if result.applied:
            self.progress.skipped_in_a_row = 0
            return
        self.progress.skipped_steps += 1
        if result.overflow:
            logger.info(
                "Step %d skipped: the fp16 loss scale was too high and is now halved.", self.progress.step
            )
            return
        self.progress.skipped_in_a_row += 1
        logger.warning(
            "Step %d skipped: loss %s, gradient norm %s. Examples of this step: %s.",
            self.progress.step,
            float(result.loss),
            float(result.grad_norm),
            sorted(self.runtime.gather(sample_ids)),
        )
        limit = self.recipe.training.max_skipped_steps
        if self.progress.skipped_in_a_row >= limit:
            raise UserError(
                f"The loss or gradient was not finite for {limit} steps in a row (training.max_skipped_steps), the "
                f"last at step {self.progress.step}. The weights are as they were before. Lower "
                "training.learning_rate, look at the examples named above, or compute in float32."
            )

    def _evaluate(self) -> EvaluationResult | None:
        """Evaluate on the held-out data, if there is any, and write the result down."""
        if self.data.evaluation is None:
            return None
        config = self.recipe.training
        batches = eval_batches(
            self.data.evaluation,
            batch_size=config.per_device_eval_batch_size or config.per_device_train_batch_size,
            num_processes=self.runtime.num_processes,
            process_index=self.runtime.process_index,
            collate=self.data.collate,
        )
        result = evaluate(
            self.session, self.runtime, batches, interrupted=lambda: self.interruption.requested
        )
        if result is not None:
            record = {
                "step": self.progress.step,
                "eval_loss": result.loss,
                "eval_perplexity": result.perplexity,
                "eval_label_tokens": result.num_label_tokens,
            }
            self._write(record, to_trackers=True)
            logger.info(
                "Step %d: held-out loss %.4f, perplexity %.2f.",
                self.progress.step,
                result.loss,
                result.perplexity,
            )
        return result

    def _save_checkpoint(self) -> None:
        folder = save_checkpoint(self.folder.path, self.session, self.runtime, self.tokenizer, self.progress)
        if self.runtime.is_main:
            delete_old_checkpoints(self.folder.path, self.recipe.training.save_total_limit)
        logger.info("Saved %s.", folder)

    def _stop_if_interrupted(self) -> None:
        if not self.runtime.any_process(self.interruption.requested):
            return
        self._save_checkpoint()
        self.runtime.end_trackers()
        logger.warning("Stopped. Go on with training.resume_from_checkpoint=auto.")
        raise SystemExit(self.interruption.exit_code)

    def _finish(self, evaluation: EvaluationResult | None) -> TrainResult:
        if self.session.lost_updates is not None:
            logger.warning(
                "%.1f %% of the sampled weight updates rounded away in %s (model.dtype); float32 weights lose none.",
                100 * self.session.lost_updates.total_fraction,
                self.session.unwrapped_model.dtype,
            )
        self.session.close()
        if self.runtime.is_main:
            save_finished_model(
                self.session.unwrapped_model,
                self.tokenizer,
                self.folder,
                self.recipe,
                steps=self.progress.step,
                tokens=self.progress.tokens,
                loss=self.last_record.get("loss"),
                evaluation=evaluation,
            )
        report_budget(self.recipe.budget, read_device_memory(self.runtime.device), read_host_memory())
        self.runtime.wait_for_everyone()
        self.runtime.end_trackers()
        return TrainResult(
            model_folder=self.folder.model_folder,
            output_dir=self.folder.path,
            steps=self.progress.step,
            loss=self.last_record.get("loss", math.nan),
            evaluation=evaluation,
        )

    def _write(self, record: dict[str, Any], *, to_trackers: bool) -> None:
        if self.runtime.is_main:
            self.folder.write_metrics(record)
        if to_trackers:
            self.runtime.log(record)

    def _num_training_steps(self) -> int:
        config = self.recipe.training
        if config.max_steps > 0:
            return config.max_steps
        if self.stream.steps_per_epoch is None:
            raise DataError(
                "data.streaming=true has no known length, so training.max_steps must say when to stop; got -1. "
                "Set training.max_steps."
            )
        return math.ceil(config.num_train_epochs * self.stream.steps_per_epoch)

    def _log_start(self) -> None:
        config = self.recipe.training
        threads, cores = torch.get_num_threads() * self.runtime.num_processes, os.cpu_count() or 1
        if self.runtime.device.type == "cpu" and threads < cores:
            logger.warning(
                "Computing on %d of %d cores (OMP_NUM_THREADS, which accelerate launch sets to 1). To use all, add "
                "--num_cpu_threads_per_process=%d to accelerate launch.",
                threads,
                cores,
                cores // self.runtime.num_processes,
            )
        examples = (
            config.per_device_train_batch_size
            * config.gradient_accumulation_steps
            * self.runtime.num_processes
        )
        logger.info(
            "Training on %s (torch %s), %d process(es): steps %d to %d, %d examples a step.",
            self.runtime.device,
            torch.__version__,
            self.runtime.num_processes,
            self.progress.step + 1,
            self.num_steps,
            examples,
        )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0
