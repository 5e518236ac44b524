"""Versions of the libraries whose code a trace runs: other versions may need other memory."""

from __future__ import annotations

import platform

import torch

import lowmem_ft
from lowmem_ft.foundation.upstream.tested import installed_version

LIBRARIES = ("transformers", "accelerate", "peft", "bitsandbytes")
"""Libraries, in addition to torch, whose code a trace runs.

PEFT decides the type of adapters, bitsandbytes how 4-bit weights are made. With another version a run can
need 5 to 20% more or less.
"""


def library_versions() -> dict[str, str]:
    """Return the versions of lowmem_ft, torch, Python and those of :data:`LIBRARIES` that are installed, by name."""
    versions = {"lowmem_ft": lowmem_ft.__version__, "torch": str(torch.__version__)}
    installed = {library: installed_version(library) for library in LIBRARIES}
    versions |= {library: version for library, version in installed.items() if version is not None}
    return {**versions, "python": platform.python_version()}
