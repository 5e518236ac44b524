"""The libraries whose code a trace runs, with their versions: other ones may need other memory."""

from __future__ import annotations

import platform

import torch

import lowmem_ft
from lowmem_ft.upstream.tested import installed_version

LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")
"""PEFT decides the type of adapters, bitsandbytes how 4-bit weights are made: with another version a run can need 5 to
20 % more or less."""


def library_versions() -> dict[str, str]:
    """Version by library, of those that are installed."""
    versions = {"lowmem_ft": lowmem_ft.__version__, "torch": str(torch.__version__)}
    installed = {library: installed_version(library) for library in LIBRARIES}
    versions |= {library: version for library, version in installed.items() if version is not None}
    return {**versions, "python": platform.python_version()}
