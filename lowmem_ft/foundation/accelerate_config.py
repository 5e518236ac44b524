"""Checks of a file of ``accelerate config``, as data: what it launches, and whether that can be estimated."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lowmem_ft.foundation.errors import UserError, raise_problems
from lowmem_ft.foundation.user_paths import expand_user, neighbours

_GPUS = ("NO", "MULTI_GPU", "FSDP")
_NAMES = {
    "DEEPSPEED": "DeepSpeed, whose engine cannot be traced",
    "MEGATRON_LM": "Megatron-LM",
    "XLA": "TPUs",
    "TPU": "TPUs",
    "MULTI_CPU": "processors",
}


def check_accelerate_config(file: str | os.PathLike[str], num_gpus: int | None = None) -> int:
    """Return the number of processes that ``accelerate launch --config_file FILE`` starts.

    Args:
        file: a YAML or JSON file, as typed.
        num_gpus: GPUs that were asked for; None: as many as the file says.

    Raises:
        UserError: if there is no such file, it is no such config, or what it launches cannot be estimated.
    """
    path = expand_user(file)
    if not path.is_file():
        raise UserError(
            f"--accelerate-config names a file that does not exist: {file}.{neighbours(path)} Correct the path."
        )
    config = _read(path, os.fspath(file))
    raise_problems([*_problems(config, os.fspath(file), num_gpus)])
    return config.get("num_processes", 1)


def _read(path: Path, typed: str) -> Mapping[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))  # of which JSON is a part
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(
            f"--accelerate-config takes a file that `accelerate config` wrote, got {typed}, which cannot be read: "
            f"{str(error).splitlines()[0]}. Correct it."
        ) from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise UserError(
            f"--accelerate-config takes a file that `accelerate config` wrote, got {typed} without distributed_type. "
            "Name that file."
        )
    return config


def _problems(config: Mapping[str, Any], typed: str, num_gpus: int | None) -> Iterator[str]:
    kind, machines = config["distributed_type"], config.get("num_machines") or 1
    number = config.get("num_processes", 1)
    kind = "NO" if kind is False else kind  # YAML reads a bare NO so
    if kind not in _GPUS or config.get("use_cpu"):
        name = _NAMES["MULTI_CPU"] if config.get("use_cpu") else _NAMES.get(kind, f"{kind}")
        yield (
            f"A script is estimated on GPUs that torch's own DDP or FSDP shares, got {typed} for {name}. Ask with a "
            "config whose distributed_type is MULTI_GPU or FSDP."
        )
    if machines != 1:
        yield (
            f"A script is estimated on the GPUs of one machine, got num_machines: {machines} in {typed}. Ask for the "
            "GPUs of one."
        )
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        yield f"num_processes is a number of GPUs, got {number} in {typed}. Correct it."
    elif num_gpus not in (None, number):
        yield (
            f"There is one process for each GPU, got {num_gpus} GPUs and num_processes: {number} in {typed}. Correct "
            "one of the two."
        )
