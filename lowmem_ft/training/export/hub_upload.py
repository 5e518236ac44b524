"""Upload of the finished model to the hub, and a check before the run that it can work."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.hub_connection import hub_is_reachable
from lowmem_ft.recipe import TrainingConfig

logger = logging.getLogger(__name__)


def check_upload() -> None:
    """Check before training that the upload at its end can work.

    Raises:
        UserError: if the hub is out of reach, or no user is logged in.
    """
    if not hub_is_reachable():
        raise UserError(
            "training.push_to_hub=true needs the hub, which cannot be reached. Set it to false, and upload the "
            "finished folder later with `hf upload NAME FOLDER`."
        )
    try:
        HfApi().whoami()
    except (HfHubHTTPError, LocalTokenNotFoundError) as error:
        raise UserError(
            "training.push_to_hub=true needs a login that the hub accepts. Run `hf auth login` with a token that has "
            "write access, or set it to false."
        ) from error


def upload_model(folder: Path, config: TrainingConfig, *, default_name: str) -> None:
    """Upload a model folder to ``training.hub_model_id``, which is created if it does not exist.

    Args:
        folder: the folder to upload.
        config: names the repository and says whether it is private.
        default_name: the repository if the recipe names none.

    Raises:
        UserError: if the hub refuses or cannot be reached any more; the folder stays, and the message says what to run.
    """
    name = config.hub_model_id or default_name
    api = HfApi()
    try:
        repository = api.create_repo(name, private=config.hub_private_repo, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=folder)
    except Exception as error:
        # The client's network errors have no type that outlives its change of HTTP library.
        raise UserError(
            f"The model is saved in {folder}, but could not be uploaded to {name}: {error}. "
            f"Run later: hf upload {name} {folder}"
        ) from error
    logger.info("Uploaded to %s.", repository)
