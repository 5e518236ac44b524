"""The model that a run, a model folder or an adapter stands for, to be exported."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.user_paths import expand_user
from lowmem_ft.models.config import ModelConfig
from lowmem_ft.recipe.rules.output_folder import holds_a_run
from lowmem_ft.recipe.rules.path_checks import MODEL_FOLDER, check_base, check_plain_model
from lowmem_ft.techniques.adapters.adapter_folder import CONFIG_FILE
from lowmem_ft.training.checkpoints.checkpoint_folders import find_checkpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ExportSource:
    """A model, perhaps with an adapter.

    Args:
        config: loads the model, or the adapter's base.
        adapter: the adapter's folder; None: a model alone.
    """

    config: ModelConfig
    adapter: Path | None


def export_source(name: str, *, base: str | None = None) -> ExportSource:
    """Find the model that a folder or hub id stands for; nothing is loaded.

    Args:
        name: a run's folder, which stands for its finished model or else its newest complete checkpoint; a model's
            folder, hub id or GGUF file; or the folder of a LoRA adapter.
        base: hub id or folder of an adapter's base model, if it has moved.

    Raises:
        UserError: if a run has trained nothing yet, ``base`` is given for a model, or an adapter or its base cannot be
            read.
        ModelError: if there is no such model.
    """
    folder = expand_user(name)
    if holds_a_run(folder):
        folder = _trained_in(folder)
        logger.info("The model of the run is %s.", folder)
        name = str(folder)
    if (folder / CONFIG_FILE).is_file():
        return ExportSource(config=check_base(folder, base=base), adapter=folder)
    if base is not None:
        raise UserError(f"--base names the base of an adapter, and {name} is a model. Leave it out.")
    return ExportSource(config=check_plain_model(name), adapter=None)


def _trained_in(run: Path) -> Path:
    """Return the folder of a run's finished model or adapter, or of its newest complete checkpoint."""
    if (run / MODEL_FOLDER).is_dir():
        return run / MODEL_FOLDER
    if checkpoint := find_checkpoint(run):
        return checkpoint
    raise UserError(
        f"The run in {run} has neither {MODEL_FOLDER}/ nor a complete checkpoint. Resume it with "
        "training.resume_from_checkpoint=auto until it has."
    )
