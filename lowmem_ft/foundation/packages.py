"""Checks for optional packages and a GPU's driver that do not import them, which may take seconds."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from lowmem_ft.foundation.errors import MissingPackageError

KERNEL_PACKAGES = {
    "flash-linear-attention": "fla",
    "causal-conv1d": "causal_conv1d",
    "mamba-ssm": "mamba_ssm",
}
"""Packages with kernels that transformers takes where they are installed, and the modules they are imported as."""

LEFT_OUT_VARIABLE = "LOWMEM_FT_WITHOUT_PACKAGES"
"""Variable that lets estimates take none of these packages as installed, unless it is empty or ``0``."""


def kernel_packages_left_out() -> bool:
    """Return whether estimates take no package with kernels as installed."""
    return os.environ.get(LEFT_OUT_VARIABLE, "") not in ("", "0")


def kernel_packages_lacking() -> frozenset[str]:
    """Return which packages with kernels are not installed on this machine."""
    modules = KERNEL_PACKAGES.items()
    return frozenset(package for package, module in modules if importlib.util.find_spec(module) is None)


def own_folder(package: str) -> str:
    """Return the folder of a package of ours, such as ``lowmem_ft.virtual_gpu``, with a separator at its end.

    Code knows calls by the file that makes them, so that its words for a folder must be true.

    Raises:
        ModuleNotFoundError: if there is no such package.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"There is no package {package}.", name=package)
    return f"{spec.submodule_search_locations[0]}{os.sep}"


def is_installed(package: str) -> bool:
    """Return whether a package can be imported; a bare folder of its name, as ``wandb`` leaves, does not count.

    Args:
        package: its name on PyPI.
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
    """Refuse a setting whose package is missing.

    Args:
        asked_for_by: the setting, for the message.
        package: its name on PyPI.
        extra: the extra of lowmem-ft that installs it.
        stand_in: another package that does as well, if it is installed.

    Raises:
        MissingPackageError: if neither is installed.
    """
    if not is_installed(package) and (stand_in is None or not is_installed(stand_in)):
        raise MissingPackageError(asked_for_by, package, extra)


def triton_lacks() -> str | None:
    """Return why Triton cannot run kernels on this machine's GPU, with the way out; None if it seems able to.

    Triton also needs a C compiler and Python's headers, as it builds the launcher of its kernels when the first one
    runs: ``CC``, else gcc, else clang. Slim images have neither. Source: Triton 3.7, ``runtime/build.py``.
    """
    if not is_installed("triton"):
        return "Triton is not installed. `pip install triton` installs it."
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and CC={compiler} is not one. Unset CC, or set it to one, such as gcc."
    if compiler is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        return "Triton needs a C compiler, and none is installed. `apt-get install gcc` installs one."
    # Debian's own has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_paths(scheme=scheme)["include"])
    if not (headers / "Python.h").is_file():
        return (
            f"Triton needs Python's headers, and {headers} does not have them. `apt-get install python3-dev` installs "
            "them."
        )
    return None


def may_have_gpu() -> bool:
    """Return whether torch may find a GPU here: without the driver of CUDA or AMD, it finds none."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/dev/kfd").exists()
    return True
