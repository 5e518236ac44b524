"""The memory budget of a run: how much of the device and of the host it may take."""

from __future__ import annotations

from dataclasses import dataclass

from lowmem_ft.foundation.knob import knob
from lowmem_ft.foundation.units import parse_bytes

DRIVER_SHARE = 0.05
"""Share of a GPU's nominal memory: a GPU sold with 24 GB hands out 23.6 GiB, one with 8 GB 7.65 GiB (4.4% less)."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory that a run may use, as text such as ``24GiB`` (2**30 bytes each) or ``24GB`` (10**9)."""

    device: str | None = knob(None, "Device memory the run may use, such as 24GiB; null: all of it.")
    host: str | None = knob(
        None,
        "Host memory of a machine that the run may use, such as 64GiB; the processes on it share it evenly; null: no "
        "limit.",
    )
    enforce: bool = knob(
        True,
        "A run above budget.device fails: on CUDA the caching allocator is capped at it, minus what the process "
        "holds outside of it (CUDA context, NCCL); on a CPU the run ends if the process is above it before the model "
        "is loaded or after the first step. false: it is only compared and logged.",
    )
    preflight: bool = knob(
        True,
        "Before weights are read, estimate what the run needs, in a separate process; a run whose estimate is above "
        "the device's memory or a budget ends there (enforce=false: it only logs a warning).",
    )
    retry: bool = knob(
        True,
        "A step that runs out of device memory before any weight has changed starts over with its micro-batches cut "
        "in two, and the rest of the run keeps the smaller size. false: the run ends there.",
    )

    def host_bytes(self, num_processes_here: int = 1) -> int | None:
        """Return the bytes of host memory that one process may take; None: no limit.

        Args:
            num_processes_here: processes on the machine.

        Raises:
            UserError: if the budget is not a size.
        """
        return None if self.host is None else parse_bytes(self.host) // num_processes_here

    def host_in_words(self, num_processes_here: int = 1) -> str:
        """Return the host budget in words, such as ``budget.host=64GiB shared by 8 processes``."""
        shared = "" if num_processes_here == 1 else f" shared by {num_processes_here} processes"
        return f"budget.host={self.host}{shared}"


def is_of_size(device_bytes: int, budget_bytes: int) -> bool:
    """Check whether a device can grant a budget: ``24GiB`` on a GPU sold with 24 GB, whose driver keeps some of it.

    Args:
        device_bytes: bytes that the device hands out.
        budget_bytes: bytes that the budget asks for.

    Returns:
        True if the device has that much, apart from the driver's share.
    """
    return device_bytes >= budget_bytes * (1 - DRIVER_SHARE)
