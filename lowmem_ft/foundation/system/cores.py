"""Cores of this machine that this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return the number of cores that the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
