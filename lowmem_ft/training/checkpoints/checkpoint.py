"""Checkpoints that are complete or absent, and from which a run resumes bit for bit.

Weights, optimizer state, position in the data and random generators are restored exactly. The steps after that have the
same bits only with deterministic kernels: on CUDA, ``training.full_determinism`` (``deterministic_kernels.py``).

``checkpoint-N/`` is an ordinary model folder (weights as safetensors, config, tokenizer; for adapters PEFT's files and
the tokenizer) that also holds the rest of the run: ``optimizer-*.safetensors``, ``random-state-RANK.json`` and, written
last, ``checkpoint.json``: the progress, every number that is not a tensor, and the size and the CRC-32 of every file.
There is no pickle.

Only the main process writes, into ``checkpoint-N.incomplete/``, which is flushed to disk and renamed. Ranks that share
a model (``distributed.strategy=fsdp2``) write there together: each writes its own rows of the model's weights and the
optimizer's state, in ``shard-RANK-of-RANKS-*.safetensors`` (``sharded_files.py``), and the main process writes the
rest, once all are done. Under DeepSpeed the other ranks send their state to the main process, a parameter at a time
(``deepspeed_state.py``). A folder without a ``checkpoint.json`` that matches its files is never used, and an older
checkpoint is deleted only after the newer one is complete.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import shutil
import zlib
from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from lowmem_ft.foundation.errors import CheckpointError
from lowmem_ft.foundation.system.atomic_write import incomplete_name, whole_folder
from lowmem_ft.foundation.units import MIB, format_bytes
from lowmem_ft.models.files.shard_files import OPTIMIZER, shard_files
from lowmem_ft.training.folder.checkpoint_folders import (
    FORMAT,
    FORMAT_OF_SHARDS,
    Progress,
    random_state_file,
    read_manifest,
)
from lowmem_ft.training.folder.own_files import MANIFEST, replace_saved
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.runtimes.runtime import Runtime
from lowmem_ft.training.step.random_state import export_random_state
from lowmem_ft.training.step.session import Session

logger = logging.getLogger(__name__)


def save_checkpoint(
    output_dir: Path,
    session: Session,
    runtime: Runtime,
    tokenizer: PreTrainedTokenizerBase,
    progress: Progress,
) -> Path:
    """Write ``checkpoint-N`` for step N; every process calls this.

    Raises:
        CheckpointError: if it cannot be written, for example because the disk is full; earlier checkpoints are
            untouched.
    """
    session.techniques.flush()
    folder = output_dir / f"checkpoint-{progress.step}"
    ranks = runtime.ranks
    random_states = ranks.gather([export_random_state(runtime.machine.device)])
    identity = ranks.gather([secrets.token_hex(8)])[0]
    with folder_of_all(folder, ranks) as partial:
        optimizer_scalars: dict[str, Any] = {}
        with one_step_of_all(folder, ranks):
            optimizer_scalars = runtime.files.save_session(session, tokenizer, partial, identity)
        shards: dict[str, int] = {}
        with one_step_of_all(folder, ranks):
            shards = _checksums(partial.glob(f"shard-{ranks.process_index:05d}-of-*"))
        checksums = dict(ChainMap(*ranks.gather([shards])))
        with one_step_of_all(folder, ranks):
            if ranks.is_main:
                for process_index, state in enumerate(random_states):
                    _write_json(partial / random_state_file(process_index), state)
                kernels = session.techniques.kernels()
                _write_manifest(partial, runtime, progress, optimizer_scalars, identity, kernels, checksums)
    return folder


@contextlib.contextmanager
def folder_of_all(target: Path, ranks: Ranks) -> Iterator[Path]:
    """Yield a :func:`whole_folder` for all processes together: the main one makes it, and renames it when all are done.

    An error in one process ends the block in all of them, at the end of the :func:`one_step_of_all` in which it occurs.

    Raises:
        CheckpointError: if a process cannot write the folder.
    """
    with contextlib.ExitStack() as writing:
        with one_step_of_all(target, ranks):
            if ranks.is_main:
                writing.enter_context(whole_folder(target, replace_saved))
        yield incomplete_name(target)
        with one_step_of_all(target, ranks):
            writing.close()


FREE_SPACE_AND_RESUME = (
    "Earlier checkpoints are untouched; free some space, then resume with "
    "training.resume_from_checkpoint=auto."
)


@contextlib.contextmanager
def one_step_of_all(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Run a block that every process leaves together; if one fails in it, all fail.

    Raises:
        CheckpointError: if a process cannot write the folder.
    """
    with ranks.failing_together(), explaining_write_errors(folder):
        yield


@contextlib.contextmanager
def explaining_write_errors(folder: Path, way_out: str = FREE_SPACE_AND_RESUME) -> Iterator[None]:
    """Turn any write error into one sentence with a way out.

    Args:
        folder: what is written.
        way_out: what to do, in a sentence; by default, advice for a run.

    Raises:
        CheckpointError: if the disk is full or refuses the write.
    """
    try:
        yield
    except Exception as error:
        from_tokenizers = type(error) is Exception  # tokenizers raises a plain Exception if it cannot write
        if not (from_tokenizers or isinstance(error, (OSError, SafetensorError))):
            raise
        raise _write_error(folder, error, way_out) from error


def load_checkpoint(folder: Path, session: Session, runtime: Runtime) -> None:
    """Restore adapters, optimizer, schedule, loss scale and random state; the model itself was built from ``folder``.

    The learning rate resumes at the checkpoint's step of the *present* recipe's schedule, so that a user can extend a
    run or change its learning rate.

    Raises:
        CheckpointError: if a file is not as it was written, or the adapters or the optimizer's state are not those of
            this run.
    """
    manifest = read_manifest(folder)
    _refuse_changed(folder, manifest.get("checksums", {}), runtime.ranks)
    runtime.files.load_session(session, folder, manifest["optimizer"])
    progress = manifest["progress"]
    _go_on_with_schedule(session.scheduler, progress["step"] - progress["skipped_steps"])
    if manifest["loss_scaler"]:
        runtime.machine.loss_scale.load_state(manifest["loss_scaler"])
    random_state = folder / random_state_file(runtime.ranks.process_index)
    if random_state.exists():
        try:
            runtime.values.load_random_state(json.loads(random_state.read_text()))
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(
                f"{folder} is damaged: {random_state.name} has no state of the random generators. Resume from another "
                "checkpoint."
            ) from error
    else:
        logger.warning(
            "%s was written by %d processes; dropout in process %d starts from its seed instead of continuing.",
            folder,
            manifest["num_processes"],
            runtime.ranks.process_index,
        )


def _write_manifest(
    partial: Path,
    runtime: Runtime,
    progress: Progress,
    optimizer_scalars: dict[str, Any],
    identity: str,
    kernels: dict[str, str],
    checksums: dict[str, int],
) -> None:
    is_cut = bool(shard_files(partial, OPTIMIZER))
    manifest = {
        "format": FORMAT_OF_SHARDS if is_cut else FORMAT,
        "identity": identity,
        "progress": asdict(progress),
        "num_processes": runtime.ranks.num_processes,
        "kernels": kernels,
        "loss_scaler": runtime.machine.loss_scale.state(),
        "optimizer": optimizer_scalars,
        "files": {file.name: file.stat().st_size for file in sorted(partial.iterdir())},
        "checksums": checksums | _checksums(file for file in partial.iterdir() if file.name not in checksums),
    }
    _write_json(partial / MANIFEST, manifest)


def _checksums(files: Iterable[Path]) -> dict[str, int]:
    """Return the CRC-32 of each file by its name: about a second for 4 GB that the system still has in memory."""
    return {file.name: _checksum(file) for file in files}


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb", buffering=0) as raw:
        while block := raw.read(16 * MIB):
            checksum = zlib.crc32(block, checksum)
    return checksum


def _refuse_changed(folder: Path, checksums: dict[str, int], ranks: Ranks) -> None:
    """Refuse a checkpoint with a file that a disk or a copy has changed; each process reads its part of the files.

    Checkpoints of earlier versions have no checksums.
    """
    names = sorted(checksums)[ranks.process_index :: ranks.num_processes]
    if changed := [name for name in names if _checksum(folder / name) != checksums[name]]:
        raise CheckpointError(
            f"{folder} is damaged: {', '.join(changed)} has other bytes than were written, by the CRC-32 in "
            f"{MANIFEST}. Copy it again, or resume from another checkpoint."
        )


def _go_on_with_schedule(scheduler: LRScheduler, applied_steps: int) -> None:
    """Set the learning rate for the step after ``applied_steps`` steps; a schedule depends on nothing else."""
    if applied_steps == 0:
        return
    # step() warns before the first update of a fresh optimizer unless it has counted a step before.
    counted = {"last_epoch": applied_steps - 1, "_step_count": applied_steps + 1}
    scheduler.load_state_dict(scheduler.state_dict() | counted)
    scheduler.step()


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value))


def _write_error(folder: Path, cause: Exception, way_out: str) -> CheckpointError:
    existing = next(path for path in folder.absolute().parents if path.exists())
    free = format_bytes(shutil.disk_usage(existing).free)
    return CheckpointError(f"{folder} cannot be written: {cause} ({free} free on that disk). {way_out}")
