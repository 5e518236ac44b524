"""The folders of checkpoints: which are there, which are whole, how far their runs had come.

Reads ``checkpoint.json`` alone and imports no torch, so that a command can say what is wrong with a run's folder before
the imports that take seconds. ``checkpoint.py`` reads and writes what lies in a checkpoint.
"""

from __future__ import annotations

import json
import logging
import operator
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowmem_ft.data.batches.position import DataPosition
from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.models.files.model_files import damage
from lowmem_ft.models.files.shard_files import MODEL, OPTIMIZER, checkpoint_of, shard_files
from lowmem_ft.training.checkpoints.saved_files import MANIFEST, delete_saved
from lowmem_ft.training.out_of_memory.micro_batch_limit import Cut

logger = logging.getLogger(__name__)

FORMAT, FORMAT_OF_SHARDS = 1, 2
"""Of a checkpoint that one process wrote, and of one to which several wrote their parts."""

SUSPECT = ".suspect"
"""Behind the name of a checkpoint whose weights may be ruined: nothing finite has come out of them."""

_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass(kw_only=True)
class Progress:
    """How far a run has come; all that the loop counts.

    Args:
        position: the next example to train on.
        data_tokens: tokens of the training data, by which other data is noticed; None when streaming.
        step: optimizer steps taken, skipped ones included.
        tokens: tokens seen, padding excluded, in all processes.
        skipped_steps: steps whose loss or gradient was not finite.
        skipped_in_a_row: how many of those came last, without an applied step between.
        loss: of the last step.
        evaluated_step: where the last evaluation was; None before the first.
        cut: the smaller pieces that steps are done in since memory ran out.
    """

    position: DataPosition
    data_tokens: int | None = None
    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    loss: float | None = None
    evaluated_step: int | None = None
    cut: Cut = field(default_factory=Cut)


def read_progress(folder: Path) -> Progress:
    """How far the run of a complete checkpoint had come."""
    return _progress_in(read_manifest(folder))


def _progress_in(manifest: dict[str, Any]) -> Progress:
    progress = manifest["progress"]
    cut = Cut(**progress.get("cut", {}))  # older checkpoints have none
    return Progress(**dict(progress, position=DataPosition(**progress["position"]), cut=cut))


def find_checkpoint(output_dir: Path, *, before: int | None = None) -> Path | None:
    """The newest complete checkpoint of a run (``before`` a step), or None; others are passed over with a warning."""
    for folder in _newest_first(output_dir):
        if before is not None and _step_of(folder) >= before:
            continue
        try:
            read_manifest(folder)
        except CheckpointError as error:
            logger.warning("%s Passing over it.", error)
        else:
            return folder
    return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What ``checkpoint.json`` says, once every file it lists is there in full.

    Raises:
        CheckpointError: if the folder is no complete checkpoint of a format this version knows, or is named as that of
            another step.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        known_format = manifest.get("format")
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{folder} is no complete checkpoint: it has no readable {MANIFEST}, which is written last."
        ) from error
    if known_format not in (FORMAT, FORMAT_OF_SHARDS):
        raise CheckpointError(
            f"{folder} has checkpoint format {known_format}, and this version reads {FORMAT} and {FORMAT_OF_SHARDS}. "
            "Resume with the lowmem_ft that wrote it."
        )
    wrong = [name for name, size in files.items() if _size(folder / name) != size]
    if wrong:
        raise CheckpointError(
            f"{folder} is damaged: {', '.join(wrong)} missing or of another size than was written."
        )
    try:
        step = _step_in(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged: {MANIFEST} lacks what a run goes on from.") from error
    if _NAME.fullmatch(folder.name) and _step_of(folder) != step:
        raise CheckpointError(
            f"{folder} is the checkpoint of step {step}. Name it checkpoint-{step}, or what is no checkpoint-N."
        )
    for file in sorted(folder.glob("*.safetensors")):
        if problem := damage(file):
            raise CheckpointError(f"{folder} is damaged: {file.name} {problem}.")
    for file in (*shard_files(folder, MODEL), *shard_files(folder, OPTIMIZER)):
        if checkpoint_of(file) != manifest.get("identity"):
            raise CheckpointError(f"{folder} is damaged: {file.name} was written for another checkpoint.")
    return manifest


def _step_in(manifest: dict[str, Any]) -> int:
    """The step of a whole manifest; any other ends in a ``KeyError``, ``TypeError`` or ``ValueError``."""
    for key in ("num_processes", "loss_scaler"):
        manifest[key]
    dict(manifest["optimizer"])
    step = operator.index(_progress_in(manifest).step)
    if step < 0:
        raise ValueError(step)
    return step


def refuse_end_before(checkpoint: Path | None, taken: int, num_steps: int) -> None:
    """Refuse a run that was to end before the step it stands at.

    Args:
        checkpoint: that it goes on from.
        taken: the checkpoint's step.
        num_steps: the step at which the recipe ends.

    Raises:
        CheckpointError: if it was.
    """
    if num_steps < taken:
        raise CheckpointError(
            f"{checkpoint} stands at step {taken}, but the recipe ends at step {num_steps}. Set "
            "training.max_steps or training.num_train_epochs higher, or resume from an earlier checkpoint."
        )


def delete_old_checkpoints(output_dir: Path, keep: int | None, *, step: int) -> None:
    """Delete all but the newest ``keep`` checkpoints (None: keep all) and whatever an interrupted save left behind.

    Args:
        output_dir: the run folder.
        keep: how many to leave.
        step: the run's step; a checkpoint beyond it is not this run's (a damaged one that was passed over) and neither
            counts nor goes.
    """
    for leftover in output_dir.glob("checkpoint-*.incomplete"):
        if _NAME.fullmatch(leftover.name.removesuffix(".incomplete")):
            delete_saved(leftover)
    own = [
        folder
        for folder in _newest_first(output_dir)
        if _step_of(folder) <= step and is_own_checkpoint(folder)
    ]
    for folder in own[keep:] if keep is not None else []:
        delete_saved(folder)


def set_aside_checkpoints(output_dir: Path, *, since: int) -> None:
    """Rename a run's checkpoints of steps from ``since`` on, so that none goes on from them unless it is named.

    Raises:
        OSError: if one cannot be renamed.
    """
    for folder in _newest_first(output_dir):
        if _step_of(folder) >= since and is_own_checkpoint(folder):
            aside = folder.with_name(f"{folder.name}{SUSPECT}")
            delete_saved(aside)  # of the same step, when it was tried before
            folder.rename(aside)
            logger.warning(
                "%s is now called %s, and training.resume_from_checkpoint=auto passes over it.",
                *(folder, aside.name),
            )


def checkpoints_after(output_dir: Path, step: int) -> list[Path]:
    """Complete checkpoints of steps that a run going on from ``step`` has yet to take, newest first."""
    return [
        folder for folder in _newest_first(output_dir) if _step_of(folder) > step and _is_complete(folder)
    ]


def is_own_checkpoint(folder: Path) -> bool:
    """Whether a folder called ``checkpoint-N`` is of our making, whole or not: other trainers use the same name."""
    first_written = folder / random_state_file(0)
    return folder.name.endswith(".incomplete") or (folder / MANIFEST).exists() or first_written.exists()


def random_state_file(process_index: int) -> str:
    """The file in a checkpoint that holds a process's random state."""
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
