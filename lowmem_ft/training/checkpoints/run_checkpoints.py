"""The checkpoints of one run: which step was saved last, what a save deletes, and what a stopped run leaves."""

from __future__ import annotations

import shlex
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lowmem_ft.training.checkpoints.checkpoint import save_checkpoint
from lowmem_ft.training.folder.checkpoint_folders import Progress, delete_old_checkpoints
from lowmem_ft.training.out_of_memory.error import not_retried
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.session import Session


class RunCheckpoints:
    """The checkpoints that a run saves, in every process of it.

    Args:
        folder: the run's folder.
        session: the model with its optimizer.
        runtime: the device and the processes.
        tokenizer: saved with the weights.
        progress: the run's position.
        keep: ``training.save_total_limit``.
        last: the checkpoint that the run resumes from.
    """

    def __init__(
        self,
        folder: Path,
        session: Session,
        runtime: Runtime,
        tokenizer: PreTrainedTokenizerBase,
        progress: Progress,
        *,
        keep: int | None,
        last: Path | None,
    ) -> None:
        self._folder, self._session, self._runtime = folder, session, runtime
        self._tokenizer, self._progress, self._keep = tokenizer, progress, keep
        self._saved_step = progress.step
        self.last = last

    @property
    def has_step(self) -> bool:
        """True if the current step was saved, or is the one that the run began with."""
        return self._saved_step == self._progress.step

    def save(self) -> Path:
        """Save the current step, and delete checkpoints that are too many.

        Raises:
            NotRetried: if memory ran out.
            CheckpointError: if the files cannot be written.
        """
        step = self._progress.step
        with not_retried(f"It ran out while the checkpoint of step {step} was saved."):
            self.last = save_checkpoint(
                self._folder, self._session, self._runtime, self._tokenizer, self._progress
            )
        self._saved_step = step
        self.delete_old()
        return self.last

    def delete_old(self) -> None:
        """Delete old checkpoints, except while steps are being skipped: they may be the only good ones."""
        if self._runtime.ranks.is_main and not self._progress.skipped_in_a_row:
            step, best = self._progress.step, self._progress.best
            delete_old_checkpoints(self._folder, self._keep, step=step, best=best and best.step)

    def left_behind(self) -> str:
        """Describe the last checkpoint after a second signal, or one before the first step, which end a run at once."""
        if self.last is None:
            return f"at step {self._progress.step}: no checkpoint was saved."
        setting = shlex.quote(f"training.resume_from_checkpoint={self.last}")
        return f"at step {self._progress.step}. Saved before: {self.last}; resume with {setting}."
