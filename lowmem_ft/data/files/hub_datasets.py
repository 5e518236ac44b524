"""Checks whether a hub dataset is available, without ``datasets``, whose import takes seconds."""

from __future__ import annotations

import os
from pathlib import Path

from lowmem_ft.data.files.files import is_hub_name
from lowmem_ft.foundation.errors import DataError
from lowmem_ft.foundation.hub_connection import hub_is_reachable
from lowmem_ft.foundation.user_paths import expand_user, neighbours


def require_dataset_within_reach(path: str, setting: str) -> None:
    """Reject a hub name with no file on this machine if the hub does not answer; paths pass.

    Args:
        path: a hub name, or anything else.
        setting: the recipe key that holds it, for the message.

    Raises:
        DataError: if nothing of it is available.
    """
    if is_hub_name(path) and not _is_cached(path) and not hub_is_reachable():
        raise not_to_be_had(path, setting, "the hub cannot be reached, and the dataset is not in the cache")


def not_to_be_had(path: str, setting: str, reason: str) -> DataError:
    """Return the error for a dataset that is neither here nor, as far as known, on the hub."""
    return DataError(
        f"{setting} names neither a local file or folder nor a hub dataset that can be reached: {path} ({reason}). "
        f"Check the spelling.{neighbours(expand_user(path))} For a gated dataset accept its terms on the hub and run "
        f"`hf auth login`; offline, run `hf download {path} --repo-type dataset --local-dir DIR` on a machine with "
        f"internet access, copy DIR here and set {setting}=DIR."
    )


def _is_cached(name: str) -> bool:
    """Return whether a folder in either cache has the dataset's name: that of its files, or that of its rows."""
    from huggingface_hub import constants

    rows = expand_user(os.environ.get("HF_DATASETS_CACHE", os.path.join(constants.HF_HOME, "datasets")))
    folders = [Path(constants.HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}")]
    folders += rows.iterdir() if rows.is_dir() else []
    return any(
        _bare(folder.name.removeprefix("datasets--")) == _bare(name) for folder in folders if folder.is_dir()
    )


def _bare(name: str) -> str:
    """Normalise the caches' spellings: ``/`` as ``--`` in one, as ``___`` and ``CamelCase`` with ``_`` in the other."""
    return name.lower().replace("/", "").replace("_", "").replace("--", "")
