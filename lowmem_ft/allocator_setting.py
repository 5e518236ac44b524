"""What a run tells torch's CUDA allocator where its environment says nothing: segments that grow.

With them, what one length of row leaves in the cache serves the next of another length; without, it lies idle beside a
new segment. Torch reads the variables when it first allocates on a GPU, so that they can be set until then.

Source: pytorch, docs/source/notes/cuda.md, "expandable_segments"; torch has them on Linux alone.
"""

from __future__ import annotations

import os
import sys

SETTING_OF_RUNS = "expandable_segments:True"

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Torch reads the older name first, even where it is empty."""


def allocator_setting(default: str = "") -> str:
    """What the environment says, or else this."""
    return next((os.environ[name] for name in _VARIABLES if name in os.environ), default)


def use_growing_segments() -> None:
    """Set the variable for this process and those that it starts, unless the environment has one or a GPU is in use."""
    in_use = "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized()
    is_set = any(name in os.environ for name in _VARIABLES)
    if sys.platform == "linux" and not in_use and not is_set:
        os.environ["PYTORCH_ALLOC_CONF"] = SETTING_OF_RUNS
