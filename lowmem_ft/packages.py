"""What is installed, asked without importing it, which may take seconds: optional packages, a GPU's driver."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
from pathlib import Path

from lowmem_ft.errors import MissingPackageError


def is_installed(package: str) -> bool:
    """Whether a package is there to be imported: not a folder of its name alone, as ``wandb`` leaves where it ran.

    Args:
        package: as pip has it.
    """
    if importlib.util.find_spec(package.replace("-", "_")) is None:
        return False
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require_package(
    asked_for_by: str, package: str, extra: str | None = None, *, stand_in: str | None = None
) -> None:
    """Refuse what needs a package that is not there.

    Args:
        asked_for_by: the setting, for the message.
        package: as pip has it.
        extra: of ours that brings it along.
        stand_in: another package that does as well, if it is there.

    Raises:
        MissingPackageError: if it is not installed.
    """
    if not is_installed(package) and (stand_in is None or not is_installed(stand_in)):
        raise MissingPackageError(asked_for_by, package, extra)


def may_have_gpu() -> bool:
    """Whether torch may find a GPU here: without CUDA's driver, and AMD's, it finds none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True
