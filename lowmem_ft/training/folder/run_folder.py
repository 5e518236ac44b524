"""The folder of one run: the checkpoint to resume from, the files it may replace, and its metrics."""

from __future__ import annotations

import contextlib
import json
import logging
import operator
from pathlib import Path
from typing import Any

from lowmem_ft.foundation.errors import CheckpointError, UserError
from lowmem_ft.foundation.system.atomic_write import write_whole_file
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.recipe import Recipe, recipe_to_yaml
from lowmem_ft.recipe.checks.path_checks import MODEL_FOLDER
from lowmem_ft.recipe.rules.output_folder import inputs_of, refuse_output_folder, run_folder_of
from lowmem_ft.training.folder.changed_recipe import log_changes, may_continue, refuse_to_continue_another
from lowmem_ft.training.folder.checkpoint_folders import (
    Progress,
    checkpoints_after,
    find_checkpoint,
    not_written,
    read_manifest,
    read_progress,
    refuse_end_before,
)
from lowmem_ft.training.folder.folder_lock import FolderLock
from lowmem_ft.training.folder.generations_file import keep_generations_before
from lowmem_ft.training.folder.replaced_run import (
    METRICS_FILE,
    RECIPE_FILE,
    delete_replaced_runs,
    in_the_way,
    move_aside,
    refuse_to_replace_inputs,
    replaced_runs,
    run_files,
)

logger = logging.getLogger(__name__)


class RunFolder:
    """The folder that a run writes to, and the checkpoint that it resumes from, if any.

    Args:
        path: the folder.
        resume_from: a complete checkpoint, or None to start from scratch.
        overwrite: whether to replace the folder's files of another run, or of later steps of this one.
    """

    def __init__(self, path: Path, *, resume_from: Path | None, overwrite: bool) -> None:
        self.path = path
        self.resume_from = resume_from
        self.overwrite = overwrite
        self._lock = FolderLock(path)

    @staticmethod
    def open(recipe: Recipe) -> RunFolder:
        """Decide where to write and where to start; read the disk and change nothing.

        Raises:
            UserError: if the folder holds another run or later steps of this one, or cannot be a folder.
            CheckpointError: if the checkpoint to resume from is incomplete or belongs to another model or data.
        """
        config = recipe.training
        path = run_folder_of(recipe)
        refuse_output_folder(recipe)
        FolderLock(path).probe()
        resume_from = _checkpoint_to_resume(config.resume_from_checkpoint, path)
        if resume_from is not None:
            refuse_to_continue_another(recipe, resume_from.parent)
            if config.max_steps > 0:
                refuse_end_before(resume_from, read_progress(resume_from).step, config.max_steps)
        folder = RunFolder(path, resume_from=resume_from, overwrite=config.overwrite_output_dir)
        folder._check_what_is_there(recipe)
        if not config.overwrite_output_dir:
            _refuse_to_replace(path, recipe, resume_from)
        if resume_from is not None:
            log_changes(recipe, resume_from.parent)
        elif config.resume_from_checkpoint is not None:
            if not config.overwrite_output_dir:
                log_changes(recipe, path)
            logger.info("Starting from the beginning: %s has no complete checkpoint.", path)
        return folder

    @staticmethod
    def checkpoint_of(recipe: Recipe) -> Path | None:
        """Return the complete checkpoint that a recipe would resume from; None: it would start from scratch.

        Raises:
            CheckpointError: if the checkpoint that it names is incomplete.
        """
        return _checkpoint_to_resume(recipe.training.resume_from_checkpoint, run_folder_of(recipe))

    @property
    def model_folder(self) -> Path:
        """Folder of the finished model."""
        return self.path / MODEL_FOLDER

    def start(self, recipe: Recipe, progress: Progress) -> None:
        """Lock the folder, move a replaced run aside, write the recipe and the metrics so far.

        Args:
            recipe: written as ``recipe.yaml``.
            progress: the position from which the run resumes; later metrics are dropped.

        Raises:
            UserError: if the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            kept = []
            if self._continues:
                kept = [record for record in self.read_metrics() if _is_before(record, progress)]
            if self.overwrite:
                self._move_aside(progress.step)
            keep_generations_before(self.path, progress if self._continues else None)
            write_whole_file(self.path / RECIPE_FILE, recipe_to_yaml(recipe))
            write_whole_file(self.path / METRICS_FILE, "".join(f"{json.dumps(record)}\n" for record in kept))
        except OSError as error:
            raise UserError(f"training.output_dir={self.path} cannot be written: {error}.") from error

    def end(self, *, succeeded: bool) -> None:
        """Delete the replaced run after a success, else log where it is; release the folder."""
        if succeeded:
            delete_replaced_runs(self.path)
        elif aside := replaced_runs(self.path):
            logger.warning("The previous contents of %s are in %s, for you to restore.", self.path, aside[-1])
        self._lock.release()

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``; the system has it when this returns, so a killed run loses no line.

        Raises:
            CheckpointError: if it cannot be written, for example because the disk is full.
        """
        file = self.path / METRICS_FILE
        try:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            raise not_written(file, error) from error

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return all lines of ``metrics.jsonl``, except a last one that a killed process left half-written.

        Raises:
            CheckpointError: if no run of lowmem_ft wrote a line.
        """
        file = self.path / METRICS_FILE
        lines = file.read_text("utf-8", errors="replace").splitlines(keepends=True) if file.exists() else []
        records = []
        for number, line in enumerate(lines, start=1):
            if not line.endswith("\n"):
                break
            try:
                record = json.loads(line)
                operator.index(record["step"])
            except (ValueError, TypeError, KeyError) as error:
                what = (
                    " is not a JSON object"
                    if isinstance(error, ValueError)
                    else ", is not from a run of lowmem_ft"
                )
                raise CheckpointError(
                    f"{file}, line {number}{what}: {line.strip()[:80]!r}. Correct or delete that line."
                ) from error
            records.append(record)
        return records

    @property
    def _continues(self) -> bool:
        """True if the run resumes in the folder of its checkpoint."""
        return self.resume_from is not None and self.resume_from.parent.resolve() == self.path.resolve()

    def _check_what_is_there(self, recipe: Recipe) -> None:
        if self._continues:
            return
        foreign = in_the_way(self.path)
        if foreign:
            raise UserError(
                f"training.output_dir={self.path} holds {', '.join(file.name for file in foreign[:3])}, which are not "
                "from a run of lowmem_ft, and this run would overwrite them. Choose another folder, or move them away."
            )
        if self.overwrite:
            refuse_to_replace_inputs(run_files(self.path), _inputs(recipe))

    def _move_aside(self, step: int) -> None:
        """Move checkpoints of later steps of this run aside, or all files of another run."""
        files = checkpoints_after(self.path, step) if self._continues else run_files(self.path)
        if not files:
            return
        aside = move_aside(self.path, files)
        logger.info(
            "The run that training.overwrite_output_dir replaces is in %s until this run has succeeded; then it is "
            "deleted.",
            aside,
        )


def _checkpoint_to_resume(requested: str | None, output_dir: Path) -> Path | None:
    if requested is None:
        return None
    if requested != "auto":
        return _named_checkpoint(expand_user(requested))
    return find_checkpoint(output_dir)


def _named_checkpoint(checkpoint: Path) -> Path:
    try:
        read_manifest(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_another(checkpoint)}") from error
    return checkpoint


def _another(named: Path) -> str:
    """Suggest a checkpoint in place of a folder that is not a complete one: one inside it (a run), or next to it."""
    if inside := find_checkpoint(named):
        return f"Did you mean {inside}?"
    if beside := find_checkpoint(named.parent):
        return f"The newest complete checkpoint next to it is {beside}."
    return "Name another one."


def _inputs(recipe: Recipe) -> dict[str, str | None]:
    """Return the paths that a run reads, by recipe key."""
    return {**inputs_of(recipe), "training.resume_from_checkpoint": recipe.training.resume_from_checkpoint}


def _refuse_to_replace(path: Path, recipe: Recipe, resume_from: Path | None) -> None:
    """Refuse to replace files of a run unless the user asks for it."""
    if resume_from is not None and resume_from.parent.resolve() == path.resolve():
        later = checkpoints_after(path, read_progress(resume_from).step)
        if later:
            raise UserError(
                f"training.resume_from_checkpoint={resume_from} is not the newest of its run, which is "
                f"{later[0].name}. Choose another training.output_dir to branch off, or drop the later ones with "
                "training.overwrite_output_dir=true."
            )
        return
    if not run_files(path):
        return
    is_finished = (path / MODEL_FOLDER).exists()
    checkpoint = None
    # With "auto" no checkpoint exists, or the run would resume from it.
    if recipe.training.resume_from_checkpoint == "auto":
        if not is_finished:
            refuse_to_continue_another(recipe, path)
    else:
        checkpoint = find_checkpoint(path)
    was_to_go_on = recipe.training.resume_from_checkpoint is not None
    if was_to_go_on and checkpoint is None and not is_finished and may_continue(recipe, path):
        return  # a run that was stopped before its first checkpoint starts over in its folder
    aside = "".join(f" (The run that it replaced is in {folder}.)" for folder in replaced_runs(path)[-1:])
    what = "another run"
    if checkpoint is None and is_finished and was_to_go_on:
        what = f"a finished run (its model is {path / MODEL_FOLDER}) without a checkpoint to resume from"
    elif checkpoint is None:
        what += ", finished and without a checkpoint" if is_finished else ", without a checkpoint"
    raise UserError(f"training.output_dir={path} holds {what}.{aside} {_ways_on(path, recipe, checkpoint)}")


def _ways_on(path: Path, recipe: Recipe, checkpoint: Path | None) -> str:
    """Return suggestions for an output folder that already holds a run; suggestions that would fail are left out."""
    ways = ["choose another folder"]
    if checkpoint is not None and _can_go_on(recipe, checkpoint):
        ways.append(f"resume from {checkpoint.name} with training.resume_from_checkpoint=auto")
    elif checkpoint is None and not (path / MODEL_FOLDER).exists() and may_continue(recipe, path):
        ways.append("restart it with training.resume_from_checkpoint=auto")
    with contextlib.suppress(UserError):
        refuse_to_replace_inputs(run_files(path), _inputs(recipe))
        ways.append("replace it with training.overwrite_output_dir=true")
    *others, last = ways
    text = f"{', '.join(others)}, or {last}" if others else last
    return f"{text[0].upper()}{text[1:]}."


def _can_go_on(recipe: Recipe, checkpoint: Path) -> bool:
    last_step = recipe.training.max_steps
    has_steps_left = last_step <= 0 or read_progress(checkpoint).step <= last_step
    return has_steps_left and may_continue(recipe, checkpoint.parent)


def _is_before(record: dict[str, Any], progress: Progress) -> bool:
    """Return whether a line precedes the checkpoint; the evaluation of the same step may have come after it."""
    if record["step"] == progress.step and "best_step" in record:
        return False  # the end of the run, which comes again
    if record["step"] == progress.step and "eval_loss" in record:
        return progress.evaluated_step == progress.step
    return record["step"] <= progress.step
