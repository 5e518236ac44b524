"""Host memory that this process may still take, by the limits of the machine, its container and its budget."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from lowmem_ft.foundation.system.host_memory import read_host_memory
from lowmem_ft.foundation.units import format_bytes

SPARE_SHARE = 0.05
"""Share of the free memory left to the rest of the process and the system: without it, the kernel kills processes."""

_UNLIMITED = 2**60
"""Bytes from which a limit means none: cgroup v1 writes a number near 2**63."""


@dataclass(frozen=True)
class HostLimit:
    """One limit on host memory.

    Args:
        available_bytes: bytes that may still be taken under it.
        source: what sets it, for people.
    """

    available_bytes: int
    source: str


def tightest_host_limit(
    budget_bytes: int | None, root: Path = Path("/"), *, file_bytes: int = 0
) -> HostLimit:
    """Return the limit that host memory meets first.

    Args:
        budget_bytes: bytes that the whole process may hold; None: no budget.
        root: the folder that contains ``proc`` and ``sys``.
        file_bytes: bytes of files that the process has mapped as memory. The kernel drops their pages when it needs
            room, so they do not count as used in a container.

    Returns:
        The machine's free memory, a container's limit or the budget, whichever leaves least.
    """
    return min(_limits(budget_bytes, root, file_bytes), key=lambda limit: limit.available_bytes)


def _limits(budget_bytes: int | None, root: Path, file_bytes: int) -> Iterator[HostLimit]:
    free = psutil.virtual_memory().available
    yield HostLimit(_without_spare(free), f"the machine has {format_bytes(free)} available")
    for folder in _cgroups(root):
        free = _cgroup_bytes(folder, file_bytes)
        if free is not None:
            yield HostLimit(
                _without_spare(free), f"the container has {format_bytes(free)} left of the limit in {folder}"
            )
    if budget_bytes is not None:
        held = read_host_memory().now_bytes
        yield HostLimit(
            budget_bytes - held,
            f"the process holds {format_bytes(held)} of its {format_bytes(budget_bytes)} from budget.host",
        )


def _without_spare(free: int) -> int:
    return max(0, round(free * (1 - SPARE_SHARE)))


def _cgroups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's memory cgroups: its own and those above it.

    A container sees only its own part of the tree, and under other names: its limit is stored at the mount itself.
    """
    table = root / "proc/self/cgroup"
    for line in table.read_text().splitlines() if table.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount = root / "sys/fs/cgroup"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
        else:
            continue
        own = mount / path.lstrip("/")
        yield from (folder for folder in (own, *own.parents) if folder == mount or mount in folder.parents)


def _cgroup_bytes(folder: Path, file_bytes: int) -> int | None:
    """Return the bytes that a cgroup has left; None if it has no limit. Droppable pages of files do not count as used.

    Pages that are often used may be dropped as well, but belong to programs; those of ``file_bytes`` are our own.
    """
    for limit_file, usage_file, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        limit, usage = _number_in(folder / limit_file), _number_in(folder / usage_file)
        if limit is not None and usage is not None and limit < _UNLIMITED:
            inactive, active = (
                _statistic(folder / "memory.stat", f"{prefix}{kind}_file") for kind in ("inactive", "active")
            )
            return max(0, limit - usage + inactive + min(active, file_bytes))
    return None


def _number_in(file: Path) -> int | None:
    """Return a file's number; None if there is no such file, or no number in it, such as ``max``."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _statistic(file: Path, name: str) -> int:
    found = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE) if file.is_file() else None
    return int(found[1]) if found else 0
