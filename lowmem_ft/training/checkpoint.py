"""Checkpoints that are whole or not there, and that continue bit for bit.

``checkpoint-N/`` is an ordinary model folder (weights as safetensors, config, tokenizer) with the rest of the run
beside it: ``optimizer-*.safetensors``, ``random-state-RANK.json`` and, written last, ``checkpoint.json``: the
progress, every number that is no tensor, and the size of every file. No pickle anywhere.

It is written into ``checkpoint-N.incomplete/``, flushed to disk, and renamed. A folder without a ``checkpoint.json``
that matches its files is never picked up, and an older checkpoint is deleted only after the newer one stands.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from lowmem_ft.data import DataPosition
from lowmem_ft.errors import CheckpointError
from lowmem_ft.models import save_model
from lowmem_ft.optimizers import OptimizerState, export_optimizer_state, import_optimizer_state
from lowmem_ft.training.random_state import export_random_state, import_random_state
from lowmem_ft.training.runtime import AccelerateRuntime
from lowmem_ft.training.session import Session
from lowmem_ft.units import GIB, format_bytes

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")
_SHARD_BYTES = 2 * GIB
"""safetensors holds one file in host memory while writing it; this bounds that, whatever the optimizer's size."""


@dataclass(kw_only=True)
class Progress:
    """How far a run has come; all that the loop counts.

    Args:
        position: the next example to train on.
        step: optimizer steps taken, skipped ones included.
        tokens: tokens seen, padding excluded, in all processes.
        skipped_steps: steps whose loss or gradient was not finite.
        skipped_in_a_row: how many of those came last, without an applied step between.
    """

    position: DataPosition
    step: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


def save_checkpoint(
    output_dir: Path,
    session: Session,
    runtime: AccelerateRuntime,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> Path:
    """Write ``checkpoint-N`` for step N; called by every process.

    Raises:
        CheckpointError: if it cannot be written, the disk being full for one; earlier checkpoints are untouched.
    """
    folder = output_dir / f"checkpoint-{progress.step}"
    partial = folder.with_suffix(".incomplete")
    error: CheckpointError | None = None
    optimizer_scalars: dict[str, Any] = {}
    if runtime.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    runtime.wait_for_everyone()
    try:
        _write_json(
            partial / f"random-state-{runtime.process_index}.json", export_random_state(runtime.device)
        )
        if runtime.is_main:
            save_model(session.unwrapped_model, tokenizer, partial)
            optimizer_scalars = _save_optimizer(session, partial)
    except (OSError, SafetensorError) as cause:
        error = _write_error(folder, cause)
    if runtime.any_process(error is not None):
        if runtime.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        raise error or CheckpointError(f"Another process could not write its part of {folder}.")
    if runtime.is_main:
        _complete(partial, folder, session, runtime, progress, optimizer_scalars)
    runtime.wait_for_everyone()
    return folder


def read_progress(folder: Path) -> Progress:
    """How far the run of a complete checkpoint had come."""
    progress = read_manifest(folder)["progress"]
    return Progress(**dict(progress, position=DataPosition.from_json(progress["position"])))


def load_checkpoint(folder: Path, session: Session, runtime: AccelerateRuntime) -> None:
    """Restore all but the weights (the model was built from ``folder``): optimizer, schedule, loss scale, random state.

    Raises:
        CheckpointError: if the optimizer's state is not this run's.
    """
    manifest = read_manifest(folder)
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("optimizer-*.safetensors")):
        tensors.update(load_file(file))
    state = OptimizerState(tensors=tensors, scalars=manifest["optimizer"])
    import_optimizer_state(session.unwrapped_optimizer, session.unwrapped_model.named_parameters(), state)
    session.scheduler.load_state_dict(manifest["scheduler"])
    if runtime.accelerator.scaler is not None and manifest["loss_scaler"]:
        runtime.accelerator.scaler.load_state_dict(manifest["loss_scaler"])
    random_state = folder / f"random-state-{runtime.process_index}.json"
    if random_state.exists():
        import_random_state(json.loads(random_state.read_text()), runtime.device)
    else:
        logger.warning(
            "%s was written by %d processes; dropout in process %d starts from its seed instead of continuing.",
            folder,
            manifest["num_processes"],
            runtime.process_index,
        )


def find_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint of a run, or None; incomplete ones are passed over with a warning."""
    for folder in _newest_first(output_dir):
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
        CheckpointError: if the folder is no complete checkpoint of a format this version knows.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder} is no complete checkpoint: it has no readable {MANIFEST}, which is written last. Resume from "
            "another one, or set training.resume_from_checkpoint=auto to take the newest complete one."
        ) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} has checkpoint format {manifest.get('format')}, and this version reads {FORMAT}. "
            "Resume with the lowmem_ft that wrote it."
        )
    wrong = [name for name, size in files.items() if _size(folder / name) != size]
    if wrong:
        raise CheckpointError(
            f"{folder} is damaged: {', '.join(wrong)} missing or of another size than was written."
        )
    return manifest


def delete_old_checkpoints(output_dir: Path, keep: int | None) -> None:
    """Delete all but the newest ``keep`` checkpoints (None: keep all) and whatever an interrupted save left behind."""
    for leftover in output_dir.glob("checkpoint-*.incomplete"):
        shutil.rmtree(leftover)
    for folder in list(_newest_first(output_dir))[keep:] if keep is not None else []:
        shutil.rmtree(folder)


def _newest_first(output_dir: Path) -> Iterator[Path]:
    steps = {
        int(match[1]): path
        for path in output_dir.glob("checkpoint-*")
        if (match := _NAME.fullmatch(path.name))
    }
    for step in sorted(steps, reverse=True):
        yield steps[step]


def _size(file: Path) -> int | None:
    return file.stat().st_size if file.is_file() else None


def _save_optimizer(session: Session, folder: Path) -> dict[str, Any]:
    """Write the tensors in shards; return what is no tensor."""
    state = export_optimizer_state(session.unwrapped_optimizer, session.unwrapped_model.named_parameters())
    for index, shard in enumerate(_shards(state.tensors)):
        contiguous = {name: tensor.detach().contiguous() for name, tensor in shard.items()}
        save_file(contiguous, folder / f"optimizer-{index:05d}.safetensors")
    return state.scalars


def _shards(tensors: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        if shard and num_bytes + tensor.nbytes > _SHARD_BYTES:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.nbytes
    if shard:
        yield shard


def _complete(
    partial: Path,
    folder: Path,
    session: Session,
    runtime: AccelerateRuntime,
    progress: Progress,
    optimizer_scalars: dict[str, Any],
) -> None:
    """Write the manifest, flush everything to disk, and only then give the folder its name."""
    scaler = runtime.accelerator.scaler
    manifest = {
        "format": FORMAT,
        "progress": asdict(progress),
        "num_processes": runtime.num_processes,
        "scheduler": session.scheduler.state_dict(),
        "loss_scaler": scaler.state_dict() if scaler is not None else None,
        "optimizer": optimizer_scalars,
        "files": {file.name: file.stat().st_size for file in sorted(partial.iterdir())},
    }
    try:
        _write_json(partial / MANIFEST, manifest)
        for path in (*partial.iterdir(), partial):
            _flush_to_disk(path)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
        _flush_to_disk(folder.parent)
    except OSError as cause:
        shutil.rmtree(partial, ignore_errors=True)
        raise _write_error(folder, cause) from cause


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def _flush_to_disk(path: Path) -> None:
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open a folder; a rename is journalled there
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_error(folder: Path, cause: Exception) -> CheckpointError:
    free = format_bytes(shutil.disk_usage(folder.parent).free)
    error = CheckpointError(
        f"{folder} cannot be written: {cause} ({free} free on that disk). Earlier checkpoints are untouched; make "
        "room, then go on with training.resume_from_checkpoint=auto."
    )
    error.__cause__ = cause
    return error
