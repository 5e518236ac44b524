"""Saving the finished model of a run: the model folder with its model card, and the upload to the hub."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from lowmem_ft.recipe import Recipe
from lowmem_ft.training.checkpoints.checkpoint import folder_of_all, one_step_of_all
from lowmem_ft.training.evaluation.best_model import BestModel
from lowmem_ft.training.export.hub_upload import upload_model
from lowmem_ft.training.folder.run_files import RunFiles
from lowmem_ft.training.folder.run_folder import RunFolder
from lowmem_ft.training.processes.ranks import Ranks
from lowmem_ft.training.step.session import Session


def save_finished_model(
    session: Session,
    ranks: Ranks,
    files: RunFiles,
    tokenizer: PreTrainedTokenizerBase,
    folder: RunFolder,
    recipe: Recipe,
    *,
    best: BestModel,
    readme: str,
    upload: bool,
) -> None:
    """Write ``model/`` (weights, tokenizer, generation config, model card), check it, and upload it if asked to.

    Every process calls this.

    Args:
        session: the session whose weights are trained.
        ranks: the processes of the run.
        files: write the model.
        tokenizer: saved with the model.
        folder: the run's folder.
        recipe: for the upload.
        best: the best model; if it is an earlier one, its checkpoint's files are written, and the session's weights,
            the last ones, are not: nothing is loaded, and no memory needed.
        readme: the text of its README.md, the model card.
        upload: whether to upload the folder.

    Raises:
        CheckpointError: if it cannot be written; the checkpoints are untouched.
        UserError: if the upload fails; the folder stays.
    """
    target = folder.model_folder
    with folder_of_all(target, ranks) as partial, one_step_of_all(target, ranks):
        if not best.is_earlier:
            files.save_trained(session, tokenizer, partial)
        elif ranks.is_main:
            files.save_from_checkpoint(session, tokenizer, best.checkpoint(), partial)
        if ranks.is_main:
            (partial / "README.md").write_text(readme, "utf-8")
    with ranks.failing_together():
        if upload and ranks.is_main:
            upload_model(target, recipe.training, default_name=folder.path.name)
