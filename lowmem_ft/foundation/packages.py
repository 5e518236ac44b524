"""What is installed, asked without importing it, which may take seconds: optional packages, a GPU's driver."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from lowmem_ft.foundation.errors import MissingPackageError


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


def triton_lacks() -> str | None:
    """Why Triton cannot run a kernel on this machine's GPU, with the way out; None: nothing is known to be missing.

    Beside itself it needs a C compiler and Python's headers, as it builds what launches its kernels when the first one
    runs: ``CC``, else gcc, else clang. Slim images have neither. Source: Triton 3.7, ``runtime/build.py``.
    """
    if not is_installed("triton"):
        return "Triton is not installed. `pip install triton` brings it."
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and CC={compiler} is none. Unset CC, or let it name one, such as gcc."
    if compiler is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton needs a C compiler, and there is none here. `apt-get install gcc` brings one."
    scheme = sysconfig.get_default_scheme().replace(
        "posix_local", "posix_prefix"
    )  # Debian's own, without headers
    headers = Path(sysconfig.get_paths(scheme=scheme)["include"])
    if not (headers / "Python.h").is_file():
        return f"Triton needs Python's headers, and {headers} has none. `apt-get install python3-dev` brings them."
    return None


def may_have_gpu() -> bool:
    """Whether torch may find a GPU here: without CUDA's driver, and AMD's, it finds none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True
