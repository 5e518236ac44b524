"""What every measured number must say: when, by which command, on what hardware, with which versions."""

from __future__ import annotations

import datetime
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch


def measured_on(device: torch.device) -> dict[str, Any]:
    """Date, command, hardware and versions, to stand beside a measurement on ``device``."""
    return {
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "hardware": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "versions": {name: version(name) for name in ("torch", "transformers", "accelerate")},
    }


def require_device(device: str) -> None:
    """End a script that is to measure on a device that torch does not see: it would go on with the processor.

    Raises:
        SystemExit: with what is missing.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"--device cuda needs a CUDA device, and torch {torch.__version__} sees none on this machine."
        )


def _processor() -> str:
    """The processor's name and the threads that torch uses; the bare architecture where the system keeps no name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.get_num_threads()} threads"
