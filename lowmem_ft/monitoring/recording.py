"""Every allocation of a real run, as a file for pytorch.org/memory_viz."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lowmem_ft.foundation.errors import raise_problems
from lowmem_ft.foundation.memory.snapshot import PICKLE_PROTOCOL
from lowmem_ft.foundation.units import format_bytes
from lowmem_ft.foundation.virtual_device import VirtualDevice, active_device

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def record_snapshot(path: Path | str, *, max_entries: int = 100_000) -> Iterator[None]:
    """Record the allocations of a block, and write them as a file that pytorch.org/memory_viz shows.

    The file is written even if the block fails, for example with an out-of-memory error, which then propagates.
    Recording ends with the block in any case, and discards the history. Inside a ``VirtualGPU`` the file is the trace,
    with modules and phases in place of stacks.

    Cost: a Python stack for each allocation and each free, some 2 µs by torch's documentation, and a few KB of host
    memory for each entry that is kept; writing 100,000 entries takes seconds. Stacks in C++, torch's default, would
    take minutes.

    Limits: it ends what another recorder has begun, as torch has one history. Only the thread that opened the block may
    close it.

    Args:
        path: path of the file, conventionally ``*.pickle``, in an existing folder.
        max_entries: number of the last allocations and frees to keep, for all devices; 100,000 are two or three steps
            of a large model.

    Raises:
        UserError: if there is no CUDA device, no such folder, or nothing to keep.

    Source: torch.cuda.memory._record_memory_history and pytorch issues 129674 (its history has no bound) and 153571.
    """
    path = Path(path)
    raise_problems(_problems(path, max_entries))
    virtual = active_device()
    with _recording_trace(virtual, max_entries) if virtual else _recording(max_entries) as snapshot:
        try:
            yield
        finally:
            _write(path, snapshot(), max_entries)


@contextlib.contextmanager
def _recording(max_entries: int) -> Iterator[Any]:
    history = torch.cuda.memory._record_memory_history
    history(enabled="all", context="all", stacks="python", max_entries=max_entries, clear_history=True)
    try:
        yield torch.cuda.memory._snapshot
    finally:
        history(enabled=None)


@contextlib.contextmanager
def _recording_trace(device: VirtualDevice, max_entries: int) -> Iterator[Any]:
    snapshot = device.snapshots()

    def last_entries() -> dict[str, Any]:
        whole = snapshot()
        return {**whole, "device_traces": [trace[-max_entries:] for trace in whole["device_traces"]]}

    yield last_entries


def _problems(path: Path, max_entries: int) -> Iterator[str]:
    if not path.absolute().parent.is_dir():
        yield f"A snapshot is written into a folder that exists, got {path}. Make {path.parent} first."
    elif path.is_dir():
        yield f"A snapshot is a file, got the folder {path}. Name a file in it, such as run.pickle."
    if max_entries < 1:
        yield f"max_entries is at least 1, got {max_entries}. Leave it out for 100,000."
    if not torch.cuda.is_available():
        yield (
            "A snapshot is the history of CUDA's allocator, and torch finds no CUDA device here. On a CPU, "
            "activation_report and find_leaks show what is held; inside the block of a `VirtualGPU`, a snapshot shows "
            "what a GPU would hold."
        )


def _write(path: Path, snapshot: dict[str, Any], max_entries: int) -> None:
    # Not torch's own _dump_snapshot, which uses Python's default protocol: the viewer knows those up to 4.
    with path.open("wb") as file:
        pickle.dump(snapshot, file, protocol=PICKLE_PROTOCOL)
    num_entries = sum(map(len, snapshot["device_traces"]))
    size = format_bytes(path.stat().st_size)
    if num_entries == 0:
        logger.warning(
            "%s shows no allocation, because nothing was allocated on the device while it was recorded.", path
        )
    elif num_entries >= max_entries:
        logger.warning(
            "%s (%s) begins later than the block: only the last %d allocations and frees were kept. Raise "
            "max_entries to see more, or record less.",
            path,
            size,
            num_entries,
        )
    else:
        logger.info(
            "%s (%s): %d allocations and frees; open it on pytorch.org/memory_viz.", path, size, num_entries
        )
