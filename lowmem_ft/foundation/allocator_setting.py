"""What a run tells torch's CUDA allocator where its environment says nothing: segments that grow.

With them, what one length of row leaves in the cache serves the next of another length; without, it lies idle beside a
new segment. Torch reads the variables when it first allocates on a GPU, so that they can be set until then.

Source: pytorch, docs/source/notes/cuda.md, "expandable_segments"; torch has them on Linux alone. On WSL the first
allocation can fail with them (pytorch issue 192330): there a run leaves torch's default.
"""

from __future__ import annotations

import os
import sys

from lowmem_ft.foundation.wsl import is_wsl

SETTING_OF_RUNS = "expandable_segments:True"

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Torch reads the older name first, even where it is empty."""


def allocator_setting(default: str = "") -> str:
    """What the environment says, or else this."""
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), default)


def segments_can_grow() -> bool:
    """Whether torch has them on this system and they can be relied on."""
    return sys.platform == "linux" and not is_wsl()


def use_growing_segments() -> None:
    """Set the variable for this process and those that it starts.

    Not where segments cannot grow, the environment has a setting, or a GPU is in use already.
    """
    in_use = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    is_set = any(name in os.environ for name in _VARIABLES)
    if segments_can_grow() and not in_use and not is_set:
        os.environ["PYTORCH_ALLOC_CONF"] = SETTING_OF_RUNS
