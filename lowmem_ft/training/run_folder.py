"""The folder of one run: ``recipe.yaml``, ``metrics.jsonl``, ``checkpoint-*/`` and, at the end, ``model/``."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lowmem_ft.errors import CheckpointError, UserError
from lowmem_ft.recipe import Recipe, load_recipe, recipe_to_yaml
from lowmem_ft.training.checkpoint import find_checkpoint, read_manifest

logger = logging.getLogger(__name__)

RECIPE_FILE, METRICS_FILE, MODEL_FOLDER, LOGS_FOLDER = "recipe.yaml", "metrics.jsonl", "model", "logs"


class RunFolder:
    """Where a run writes, and the checkpoint it goes on from, if any.

    Args:
        path: the folder.
        resume_from: a complete checkpoint, or None to start afresh.
        overwrite: whether a run that the folder holds is to be replaced.
    """

    def __init__(self, path: Path, *, resume_from: Path | None, overwrite: bool) -> None:
        self.path = path
        self.resume_from = resume_from
        self.overwrite = overwrite

    @staticmethod
    def open(recipe: Recipe) -> RunFolder:
        """Decide where to write and where to start; reads the disk and changes nothing.

        Raises:
            UserError: if the folder holds another run, or cannot be a folder.
            CheckpointError: if the checkpoint to resume from is incomplete or belongs to another model or data.
        """
        config = recipe.training
        path = Path(config.output_dir or f"runs/{recipe.name}").expanduser()
        resume_from = _checkpoint_to_resume(config.resume_from_checkpoint, path)
        if path.exists() and not path.is_dir():
            raise UserError(f"training.output_dir={path} is a file. Name a folder.")
        if resume_from is not None:
            _refuse_other_run(recipe, resume_from.parent)
        elif _holds_a_run(path) and not config.overwrite_output_dir:
            raise UserError(
                f"training.output_dir={path} holds another run. Choose another folder, go on with "
                "training.resume_from_checkpoint=auto, or replace it with training.overwrite_output_dir=true."
            )
        return RunFolder(path, resume_from=resume_from, overwrite=config.overwrite_output_dir)

    @property
    def model_folder(self) -> Path:
        """Where the finished model goes."""
        return self.path / MODEL_FOLDER

    def start(self, recipe: Recipe, step: int) -> None:
        """Write the recipe; drop a replaced run, or the metrics of steps that the resumed run will take again.

        Args:
            recipe: written as ``recipe.yaml``.
            step: the step to go on from; 0 for a fresh start.
        """
        if self.resume_from is None and self.overwrite:
            for leftover in _run_files(self.path):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / RECIPE_FILE).write_text(recipe_to_yaml(recipe))
        kept = [record for record in self.read_metrics() if record["step"] <= step]
        (self.path / METRICS_FILE).write_text("".join(f"{json.dumps(record)}\n" for record in kept))

    def write_metrics(self, record: dict[str, Any]) -> None:
        """Append one line to ``metrics.jsonl``; it is on disk when this returns, so a killed run loses none."""
        with (self.path / METRICS_FILE).open("a") as file:
            file.write(json.dumps(record) + "\n")

    def read_metrics(self) -> list[dict[str, Any]]:
        """All lines of ``metrics.jsonl``; a last line that a killed process left half-written is dropped."""
        file = self.path / METRICS_FILE
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]


def _checkpoint_to_resume(requested: str | None, output_dir: Path) -> Path | None:
    if requested is None:
        return None
    if requested != "auto":
        checkpoint = Path(requested).expanduser()
        read_manifest(checkpoint)
        return checkpoint
    checkpoint = find_checkpoint(output_dir)
    if checkpoint is None:
        logger.info("Starting afresh: %s holds no complete checkpoint.", output_dir)
    return checkpoint


def _refuse_other_run(recipe: Recipe, run: Path) -> None:
    """A checkpoint continues its own run: same weights, data and optimizer; the rest of the recipe may change."""
    file = run / RECIPE_FILE
    if not file.exists():
        return
    saved = load_recipe(str(file))
    differences = [
        f"{name} was {was!r}, is {now!r}"
        for name, was, now in (
            ("model.name_or_path", saved.model.name_or_path, recipe.model.name_or_path),
            ("model.dtype", saved.model.dtype, recipe.model.dtype),
            ("data.path", saved.data.path, recipe.data.path),
            ("data.split", saved.data.split, recipe.data.split),
            ("data.packing", saved.data.packing, recipe.data.packing),
            ("data.max_length", saved.data.max_length, recipe.data.max_length),
            ("optimizer.name", saved.optimizer.name, recipe.optimizer.name),
            ("training.seed", saved.training.seed, recipe.training.seed),
        )
        if was != now
    ]
    if differences:
        raise CheckpointError(
            f"{run} holds a run of another recipe ({'; '.join(differences)}), which this one cannot continue. "
            "Set these back, or choose another training.output_dir."
        )


def _run_files(path: Path) -> Iterable[Path]:
    """Everything in the folder that a run writes, and nothing else."""
    names = (RECIPE_FILE, METRICS_FILE, MODEL_FOLDER, LOGS_FOLDER)
    yield from (path / name for name in names if (path / name).exists())
    yield from path.glob("checkpoint-*")


def _holds_a_run(path: Path) -> bool:
    return any(True for _ in _run_files(path))
