"""The libraries whose code a trace runs, with their versions: other ones may need other memory."""

from __future__ import annotations

import importlib.metadata
import platform

import torch

import lowmem_ft

LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")
"""PEFT decides the type of adapters, bitsandbytes how 4-bit weights are made: with another version a run can need 5 to
20 % more or less."""


def library_versions() -> dict[str, str]:
    """Version by library, of those that are installed."""
    versions = {"lowmem_ft": lowmem_ft.__version__, "torch": str(torch.__version__)}
    for library in LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**versions, "python": platform.python_version()}
