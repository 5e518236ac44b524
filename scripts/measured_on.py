"""The data that every measured number needs: date, command, hardware and versions."""

from __future__ import annotations

import datetime
import fcntl
import os
import platform
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

_TURNS = Path(tempfile.gettempdir()) / "lowmem_ft_measurement.lock"
"""File that a process locks while it is on the GPU."""


def measured_on(device: torch.device) -> dict[str, Any]:
    """Return date, command, hardware and versions, to store with a measurement on ``device``."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }


def require_device(device: str) -> None:
    """Exit if a script shall measure on a device that torch does not see: it would run on the processor instead.

    Raises:
        SystemExit: with a message that says what is missing.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"--device cuda needs a CUDA device, and torch {torch.__version__} sees none on this machine."
        )


def wait_for_the_gpu() -> None:
    """Keep the GPU from this script's other processes until this one ends; wait while another has it.

    Processes that take turns import everything at once, which takes longer than some measurements do.
    """
    fcntl.flock(os.open(_TURNS, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)


def _processor() -> str:
    """Return the processor's name and torch's number of threads; only the architecture if the system has no name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
