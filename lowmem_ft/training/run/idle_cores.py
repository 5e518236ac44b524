"""Warning for a run that ``OMP_NUM_THREADS`` keeps from using all CPU cores."""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)


def warn_of_idle_cores(num_processes: int) -> None:
    """Warn if ``OMP_NUM_THREADS`` keeps cores idle, with a way out that depends on the launcher that set it.

    ``accelerate launch`` sets it to 1, and so does torchrun for several processes. If it is not set, torch uses one
    thread per physical core, which is fastest. More threads than idle cores wait for each other, so a machine that
    is busy gets no such advice.

    Args:
        num_processes: processes of this run, all assumed to be on this machine.
    """
    threads, cores = torch.get_num_threads() * num_processes, os.cpu_count() or 1
    if "OMP_NUM_THREADS" not in os.environ or threads >= cores - _busy_cores():
        return
    logger.warning(
        "Using %d of %d cores, because OMP_NUM_THREADS=%s. To use all, %s.",
        threads,
        cores,
        os.environ["OMP_NUM_THREADS"],
        _way_out(max(1, cores // num_processes)),
    )


def _busy_cores() -> int:
    """Return the cores on which other programs have been running for a minute, where the system counts them."""
    if not hasattr(os, "getloadavg"):  # Windows
        return 0
    return max(0, round(os.getloadavg()[0]) - 1)  # one is this process


def _way_out(num_threads: int) -> str:
    if "ACCELERATE_MIXED_PRECISION" in os.environ:  # accelerate launch always sets it
        return f"add --num_cpu_threads_per_process={num_threads} to accelerate launch"
    return f"set OMP_NUM_THREADS={num_threads}"
