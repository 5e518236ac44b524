"""The setting of torch's CUDA allocator for runs whose environment has none: segments that grow.

With it, memory cached for rows of one length also serves rows of another length; without it, that memory stays idle
next to a new segment. Torch reads the variables when it first allocates on a GPU, so they can be set until then.

Source: pytorch, docs/source/notes/cuda.md, "expandable_segments"; torch has them on Linux only. On WSL the first
allocation can fail with them (pytorch issue 192330): there a run keeps torch's default.
"""

from __future__ import annotations

import os
import sys

from lowmem_ft.foundation.wsl import is_wsl

SETTING_OF_RUNS = "expandable_segments:True"

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The variables torch reads; it reads the older name first, even if that is empty."""


def allocator_variable() -> str | None:
    """Return the variable of the environment that torch takes the allocator's setting from; None if neither is set."""
    return next((name for name in _VARIABLES if name in os.environ), None)


def allocator_setting(default: str = "") -> str:
    """Return the allocator setting of the environment, else ``default``."""
    variable = allocator_variable()
    return default if variable is None else os.environ[variable]


def segments_can_grow() -> bool:
    """Return whether torch has growing segments on this system and they are reliable."""
    return sys.platform == "linux" and not is_wsl()


def use_growing_segments() -> None:
    """Set the variable for this process and its children.

    Does nothing if segments cannot grow, the environment has a setting, or a GPU is already in use.
    """
    in_use = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    if segments_can_grow() and not in_use and allocator_variable() is None:
        os.environ["PYTORCH_ALLOC_CONF"] = SETTING_OF_RUNS
