"""Host memory that this process holds, now and at its highest: what is resident and no page of a file.

Pages of files (the libraries' code, a dataset, a mapped checkpoint) do not count. The system drops them when it needs
the room and reads them again, processes share them, and how many it maps beyond those asked for is its own choice: the
same run had 158 MiB of them with libraries in one folder and 291 MiB with the same in another, and held 367 MiB with
either.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import psutil

from lowmem_ft.foundation.units import KIB

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What Linux takes for: let the peak of resident memory begin anew (proc(5), ``clear_refs``)."""


def held_bytes() -> int:
    """Now."""
    status = _status()
    if "VmRSS" in status:
        return status["VmRSS"] - status.get("RssFile", 0)
    return psutil.Process(os.getpid()).memory_info().rss


def resident_file_bytes() -> int:
    """Pages of files that are resident now; 0 where the system does not tell them apart, as Linux does."""
    return _status().get("RssFile", 0)


def peak_held_bytes() -> int:
    """The most since the process, or the last :func:`reset_peak`, began.

    Linux keeps the peak of all resident memory: pages of files are taken off as they are now. Files that have been
    mapped and let go since would count: who maps a large one lets its pages go one after the other
    (:func:`lowmem_ft.host.mapped_files.forget_pages`). The peak is not from ``getrusage``, which also counts what
    the process was before it became this program: after a ``fork`` that is its parent, such as a notebook with a model
    in it.
    """
    if sys.platform == "win32":
        return psutil.Process(os.getpid()).memory_info().peak_wset
    status = _status()
    peak_bytes = status["VmHWM"] if "VmHWM" in status else _of_getrusage()
    return max(peak_bytes - status.get("RssFile", 0), held_bytes())


def reset_peak() -> bool:
    """Let the peak begin anew.

    Returns:
        Whether it does: Linux alone can, and not in each container.
    """
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK)
    except OSError:  # another system, or a container that keeps /proc to itself
        return False
    return True


def _status() -> dict[str, int]:
    """What Linux says of this process, in bytes; empty where nothing does."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE) if _STATUS.exists() else ()
    return {name: int(size) * KIB for name, size in lines}


def _of_getrusage() -> int:
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * KIB  # Linux counts in KiB
