"""The processor of this machine, and the cores of it that this process may use."""

from __future__ import annotations

import os
import platform


def usable_cores() -> int:
    """Return the number of cores that the system lets this process run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Return the processor's name as the system has it; its architecture where the system names none."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    return next(filter(None, names), "") or platform.processor() or platform.machine()
