"""The GPU of each process of a launch and the cores near it; a missing GPU is reported before any process waits."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lowmem_ft.foundation.errors import UserError
from lowmem_ft.foundation.system.numa import run_near
from lowmem_ft.training.processes.launch import Launch, processes_here

logger = logging.getLogger(__name__)

_DRIVER = Path("/proc/driver/nvidia/version")
"""File that exists if NVIDIA's kernel module is loaded."""


def own_gpu(launch: Launch, *, use_cpu: bool, environment: Mapping[str, str] | None = None) -> str:
    """Return the unique name of the GPU that Accelerate gives this process; empty on a CPU.

    Args:
        launch: a launch of several processes.
        use_cpu: whether the recipe trains on the CPU.
        environment: the variables; None: this process's.

    Raises:
        UserError: if torch sees no GPU.
    """
    environment = os.environ if environment is None else environment
    if use_cpu or environment.get("ACCELERATE_USE_CPU", "").lower() == "true":
        return ""
    if not torch.cuda.is_available():
        here = processes_here(launch.num_processes, environment)
        raise UserError(
            f"Each of the {here} processes on this machine needs a GPU of its own, and torch sees none: "
            f"{why_no_gpu(environment)}. Set training.use_cpu=true to train on the processor, with several processes "
            "too."
        )
    properties = _properties(environment)
    return f"{properties.name}, UUID {properties.uuid}"


def run_near_own_gpu(environment: Mapping[str, str] | None = None) -> None:
    """Keep this process to the cores of its GPU's NUMA node, if the machine has several.

    Args:
        environment: the variables; None: this process's.
    """
    properties = _properties(os.environ if environment is None else environment)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    cores = run_near(address)
    if cores:
        logger.info(
            "This process runs on the %d cores of the NUMA node of its GPU (%s, %s).",
            len(cores),
            properties.name,
            address,
        )


def _properties(environment: Mapping[str, str]) -> Any:
    """Return the properties of the GPU that Accelerate gives this process."""
    index = int(environment.get("LOCAL_RANK") or 0) % torch.cuda.device_count()  # as Accelerate counts
    return torch.cuda.get_device_properties(index)


def why_no_gpu(environment: Mapping[str, str]) -> str:
    """Return the most likely reason why torch sees no GPU, as the middle of a sentence."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return f"CUDA_VISIBLE_DEVICES={visible!r}"
    return "`nvidia-smi` shows whether the driver does"


def expected_gpu(environment: Mapping[str, str] | None = None) -> str | None:
    """Return why a user hardly meant to run on the CPU, as the middle of a sentence; None without a sign of a GPU."""
    environment = os.environ if environment is None else environment
    if torch.cuda.is_available():
        return None
    has_signs = torch.backends.cuda.is_built() or _DRIVER.exists() or "CUDA_VISIBLE_DEVICES" in environment
    return why_no_gpu(environment) if has_signs else None
