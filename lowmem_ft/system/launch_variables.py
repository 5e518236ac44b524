"""The environment variables by which every launcher tells a process its place among the others."""

from __future__ import annotations

import os


def is_main_process() -> bool:
    """Return whether this process speaks for all of its launch."""
    return os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0"


def is_launched() -> bool:
    """Return whether this is one of several processes that find each other by these variables."""
    size = os.environ.get("WORLD_SIZE", "")
    return "LOCAL_RANK" in os.environ and size.isdigit() and int(size) > 1
