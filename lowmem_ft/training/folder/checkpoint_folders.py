"""Checkpoint folders: which exist, which are complete, and the progress of their runs.

This module reads only ``checkpoint.json`` and imports no torch, so that a command can report problems of a run's folder
before the imports that take seconds. ``checkpoint.py`` reads and writes the contents of a checkpoint.
"""

from __future__ import annotations

import errno
import json
import logging
import operator
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.system.atomic_write import INCOMPLETE
from lowmem_ft.models.files.model_files import damage
from lowmem_ft.models.files.shard_files import MODEL, OPTIMIZER, checkpoint_of, shard_files
from lowmem_ft.training.folder.micro_batch_limit import MicroBatchLimit
from lowmem_ft.training.folder.own_files import MANIFEST, delete_saved

logger = logging.getLogger(__name__)

FORMAT, FORMAT_OF_SHARDS = 1, 2
"""Format numbers of a checkpoint written by one process, and of one to which several processes wrote their parts."""

SUSPECT = ".suspect"
"""Suffix of a checkpoint whose weights may be ruined: they have produced nothing finite since."""

_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True, kw_only=True)
class BestEvaluation:
    """The best evaluation of a run so far.

    Args:
        step: the step after which it was made.
        metrics: its values, by their names in ``metrics.jsonl``.
    """

    step: int
    metrics: dict[str, Any]


@dataclass(kw_only=True)
class Progress:
    """Progress of a run: everything that the loop counts.

    Args:
        position: the next example to train on.
        data_tokens: tokens of the training data, by which a change of data is detected; None when streaming.
        data_fingerprint: digest of the training rows (``PreparedData.fingerprint``); empty in older checkpoints.
        step: optimizer steps taken, skipped ones included.
        tokens: tokens seen, padding excluded, in all processes.
        skipped_steps: steps whose loss or gradient was not finite.
        skipped_in_a_row: skipped steps since the last applied step.
        loss: loss of the last step.
        evaluated_step: step of the last evaluation; None before the first.
        best: the best evaluation; None: no evaluation was compared yet.
        evaluations_without_gain: evaluations since the last one that was better by ``early_stopping_threshold``.
        cut: the micro-batch limit in force since memory ran out.
    """

    position: DataPosition
    data_tokens: int | None = None
    data_fingerprint: str = ""
    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss: float | None = None
    evaluated_step: int | None = None
    best: BestEvaluation | None = None
    evaluations_without_gain: int = 0
    cut: MicroBatchLimit = field(default_factory=MicroBatchLimit)


def read_progress(folder: Path) -> Progress:
    """Return the progress of a complete checkpoint's run."""
    return _progress_in(read_manifest(folder))


def _progress_in(manifest: dict[str, Any]) -> Progress:
    progress = manifest["progress"]
    cut = MicroBatchLimit(**progress.get("cut", {}))  # absent in older checkpoints
    best = progress.get("best")
    position = DataPosition(**progress["position"])
    return Progress(**dict(progress, position=position, cut=cut, best=best and BestEvaluation(**best)))


def find_checkpoint(output_dir: Path, *, before: int | None = None) -> Path | None:
    """Return the newest complete checkpoint of a run (``before`` a step), or None; skip others with a warning."""
    for folder in _newest_first(output_dir):
        if before is not None and _step_of(folder) >= before:
            continue
        try:
            read_manifest(folder)
        except CheckpointError as error:
            logger.warning("%s Skipping it.", error)
        else:
            return folder
    return None


def not_written(file: Path, error: OSError) -> CheckpointError:
    """Return the error of a file in a run's folder that cannot be written, with what is left of the run."""
    run = file.parent
    if not run.is_dir():
        return CheckpointError(
            f"{file} cannot be written: the folder {run} is gone, with what the run had saved there. Start the run "
            "again, and leave its folder in place until it ends."
        )
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    way_out = "free some space, then" if is_full else "once that is fixed,"
    if _newest_first(run):
        way_out = (
            f"The checkpoints are untouched; {way_out} resume with training.resume_from_checkpoint=auto."
        )
    else:
        way_out = f"There is no checkpoint yet; {way_out} start the run again."
    return CheckpointError(f"{file} cannot be written: {error.strerror or error}. {way_out}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the contents of ``checkpoint.json``, after checking that every file it lists is complete.

    Raises:
        CheckpointError: if the folder is not a complete checkpoint in a format that this version knows, or has the name
            of another step.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        known_format = manifest.get("format")
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: it has no readable {MANIFEST}, which is written last."
        ) from error
    if known_format not in (FORMAT, FORMAT_OF_SHARDS):
        raise CheckpointError(
            f"{folder} has checkpoint format {known_format}, and this version reads {FORMAT} and {FORMAT_OF_SHARDS}. "
            "Resume with the lowmem_ft that wrote it."
        )
    wrong = [name for name, size in files.items() if _size(folder / name) != size]
    if wrong:
        raise CheckpointError(
            f"{folder} is damaged: {', '.join(wrong)} missing, or different in size from what was written."
        )
    try:
        step = _step_in(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} lacks the state to resume from.") from error
    if _NAME.fullmatch(folder.name) and _step_of(folder) != step:
        raise CheckpointError(
            f"{folder} is the checkpoint of step {step}. Name it checkpoint-{step}, or something other than "
            "checkpoint-N."
        )
    for file in sorted(folder.glob("*.safetensors")):
        if problem := damage(file):
            raise CheckpointError(f"{folder} is damaged: {file.name} {problem}.")
    for file in (*shard_files(folder, MODEL), *shard_files(folder, OPTIMIZER)):
        if checkpoint_of(file) != manifest.get("identity"):
            raise CheckpointError(f"{folder} is damaged: {file.name} was written for another checkpoint.")
    return manifest


def _step_in(manifest: dict[str, Any]) -> int:
    """Return the step of a complete manifest; raise ``KeyError``, ``TypeError`` or ``ValueError`` for any other."""
    for key in ("num_processes", "loss_scaler"):
        manifest[key]
    dict(manifest["optimizer"])
    step = operator.index(_progress_in(manifest).step)
    if step < 0:
        raise ValueError(step)
    return step


def refuse_end_before(checkpoint: Path | None, taken: int, num_steps: int) -> None:
    """Refuse a run whose recipe ends before the step of its checkpoint.

    Args:
        checkpoint: the checkpoint that the run resumes from.
        taken: the checkpoint's step.
        num_steps: the step at which the recipe ends.

    Raises:
        CheckpointError: if ``num_steps`` is less than ``taken``.
    """
    if num_steps < taken:
        raise CheckpointError(
            f"{checkpoint} is at step {taken}, but the recipe ends at step {num_steps}. Set training.max_steps or "
            "training.num_train_epochs higher, or resume from an earlier checkpoint."
        )


def delete_old_checkpoints(output_dir: Path, keep: int | None, *, step: int, best: int | None = None) -> None:
    """Delete checkpoints older than the newest ``keep`` (None: keep all), and the leftovers of interrupted saves.

    The best checkpoint is never deleted. As in transformers it is one of those kept, unless only one is: then both the
    newest and the best stay.

    Args:
        output_dir: the run folder.
        keep: how many to leave.
        step: the run's step; a checkpoint of a later step is not this run's (a damaged one that was skipped): it is
            neither counted nor deleted.
        best: the step of the run's best checkpoint; None: it has none.
    """
    for leftover in output_dir.glob(f"checkpoint-*{INCOMPLETE}"):
        if _NAME.fullmatch(leftover.name.removesuffix(INCOMPLETE)):
            delete_saved(leftover)
    own = [
        folder
        for folder in _newest_first(output_dir)
        if _step_of(folder) <= step and is_own_checkpoint(folder)
    ]
    if keep is None:
        return
    if any(_step_of(folder) == best for folder in own[keep:]):
        keep = max(keep - 1, 1)
    for folder in own[keep:]:
        if _step_of(folder) != best:
            delete_saved(folder)


def set_aside_checkpoints(output_dir: Path, *, since: int) -> None:
    """Rename a run's checkpoints of steps from ``since`` on, so that no run resumes from them unless a user names one.

    Raises:
        OSError: if one cannot be renamed.
    """
    for folder in _newest_first(output_dir):
        if _step_of(folder) >= since and is_own_checkpoint(folder):
            aside = folder.with_name(f"{folder.name}{SUSPECT}")
            delete_saved(aside)  # left by an earlier attempt at the same step
            folder.rename(aside)
            logger.warning(
                "%s is now called %s, and training.resume_from_checkpoint=auto ignores it.",
                *(folder, aside.name),
            )


def checkpoint_of_step(step: int, folders: Iterable[Path]) -> Path:
    """Return the complete checkpoint of a step in the first of these run folders that has it.

    Raises:
        CheckpointError: if none has it.
    """
    places = list(dict.fromkeys(folders))
    for folder in places:
        if (checkpoint := folder / f"checkpoint-{step}").is_dir():
            read_manifest(checkpoint)
            return checkpoint
    raise CheckpointError(
        f"checkpoint-{step} has the best model so far, and is not in {' or '.join(map(str, places))}. Put it back, or "
        "finish with the last model: training.load_best_model_at_end=false."
    )


def checkpoints_after(output_dir: Path, step: int) -> list[Path]:
    """Return complete checkpoints of steps that a run resumed from ``step`` has yet to take, newest first."""
    return [
        folder for folder in _newest_first(output_dir) if _step_of(folder) > step and _is_complete(folder)
    ]


def is_own_checkpoint(folder: Path) -> bool:
    """Check whether lowmem_ft wrote a folder called ``checkpoint-N``, complete or not: other trainers use that name."""
    first_written = folder / random_state_file(0)
    return folder.name.endswith(INCOMPLETE) or (folder / MANIFEST).exists() or first_written.exists()


def random_state_file(process_index: int) -> str:
    """Return the name of the file in a checkpoint that holds a process's random state."""
    return f"random-state-{process_index}.json"


def _is_complete(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except CheckpointError:
        return False
    return True


def _newest_first(output_dir: Path) -> list[Path]:
    folders = [path for path in output_dir.glob("checkpoint-*") if _NAME.fullmatch(path.name)]
    return sorted(folders, key=_step_of, reverse=True)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("checkpoint-"))


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None
