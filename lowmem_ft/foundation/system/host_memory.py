"""Host memory that this process holds, now and at its highest: resident memory without pages of files.

Pages of files (the libraries' code, a dataset, a mapped checkpoint) do not count. The system drops them when it needs
the room and reads them again, processes share them, and the system itself chooses how many it maps beyond those that
were read: the same run had 158 MiB of them with libraries in one folder and 291 MiB with the same in another, and held
367 MiB with either.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from lowmem_ft.foundation.units import KIB

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""The value that makes Linux reset the peak of resident memory (proc(5), ``clear_refs``)."""

_peak_before: list[int] = []
"""The highest peak before the last reset, if there was one."""


@dataclass(frozen=True)
class MemoryReading:
    """Bytes held at one moment and the most held since the process (on CUDA: the last reset) began."""

    now_bytes: int
    peak_bytes: int


def read_host_memory() -> MemoryReading:
    """Return host memory that this process holds, now and at its peak."""
    return MemoryReading(held_bytes(), max([peak_held_bytes(), *_peak_before]))


def held_bytes() -> int:
    """Return bytes held now."""
    status = _status()
    if "VmRSS" in status:
        return status["VmRSS"] - status.get("RssFile", 0)
    return psutil.Process(os.getpid()).memory_info().rss


def resident_file_bytes() -> int:
    """Return bytes of files' pages that are resident now; 0 if the system does not count them apart, as Linux does."""
    return _status().get("RssFile", 0)


def peak_held_bytes() -> int:
    """Return the most held since the process began, or since the last :func:`reset_peak`.

    Linux keeps the peak of all resident memory, so this subtracts pages of files as they are now. Files that have been
    mapped and released since would count: code that maps a large one drops its pages one after the other
    (:func:`lowmem_ft.foundation.host.mapped_files.forget_pages`). The peak is not from ``getrusage``, which also counts
    the process before it became this program: after a ``fork`` that is its parent, such as a notebook with a model in
    it.
    """
    if sys.platform == "win32":
        return psutil.Process(os.getpid()).memory_info().peak_wset
    status = _status()
    peak_bytes = status["VmHWM"] if "VmHWM" in status else _of_getrusage()
    return max(peak_bytes - status.get("RssFile", 0), held_bytes())


def reset_peak() -> bool:
    """Reset :func:`peak_held_bytes`; :func:`read_host_memory` keeps the peak of the whole run.

    Returns:
        True if it was reset: only Linux can, and not in every container.
    """
    peak_bytes = read_host_memory().peak_bytes
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # another system, or a container that keeps /proc to itself
        return False
    _peak_before[:] = [peak_bytes]
    return True


def _status() -> dict[str, int]:
    """Return sizes of this process by Linux, in bytes; empty on other systems."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE) if _STATUS.exists() else ()
    return {name: int(size) * KIB for name, size in lines}


def _of_getrusage() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB  # Linux counts in KiB
