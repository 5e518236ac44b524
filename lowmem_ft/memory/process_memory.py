"""Resident memory of this process, as the system counts it: now, and at its highest."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import psutil

from lowmem_ft.units import KIB

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What Linux takes for: let the peak of resident memory begin anew (proc(5), ``clear_refs``)."""


def resident_bytes() -> int:
    """Now."""
    return psutil.Process(os.getpid()).memory_info().rss


def peak_resident_bytes() -> int:
    """The most since the process, or the last :func:`reset_peak_resident`, began.

    On Linux not from ``getrusage``, which also counts what the process was before it became this program: after a
    ``fork`` that is its parent, such as a notebook with a model in it.
    """
    memory = psutil.Process(os.getpid()).memory_info()
    if sys.platform == "win32":
        return memory.peak_wset
    high_water = (
        re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE) if _STATUS.exists() else None
    )
    peak_bytes = _of_getrusage() if high_water is None else int(high_water[1]) * KIB
    return max(peak_bytes, memory.rss)


def reset_peak_resident() -> bool:
    """Let the peak begin anew.

    Returns:
        Whether it does: Linux alone can, and not in each container.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # another system, or a container that keeps /proc to itself
        return False
    return True


def _of_getrusage() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB  # Linux counts in KiB
