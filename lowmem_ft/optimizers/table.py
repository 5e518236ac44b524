"""The optimizers, one row each. A new one adds a row here, and its name and hyperparameters in ``config.py``.

State is counted in bytes a parameter, given the bytes of one weight: AdamW keeps two tensors of its type.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from lowmem_ft.devices import kernels_of
from lowmem_ft.errors import MissingPackageError, UserError
from lowmem_ft.optimizers.bitsandbytes_optimizers import bitsandbytes_builder, is_bitsandbytes_installed
from lowmem_ft.optimizers.config import OptimizerConfig
from lowmem_ft.optimizers.lion import Lion
from lowmem_ft.optimizers.torch_optimizers import build_adafactor, build_adamw, build_sgd


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """One optimizer of the table.

    Args:
        build: takes parameter groups, ``lr`` and the hyperparameters below.
        summary: one line for people.
        state_bytes: bytes of state a parameter, given the bytes of one weight.
        needs_bitsandbytes: whether the package must be installed.
        devices: device types it runs on; None is all of them.
        elsewhere: the name to suggest on other devices.
    """

    build: Callable[..., Optimizer]
    summary: str
    state_bytes: Callable[[int], float]
    needs_bitsandbytes: bool = False
    devices: tuple[str, ...] | None = None
    elsewhere: str = "adamw"


_BLOCKWISE_8BIT = 1 + 4 / 256  # a byte an element, and a float32 scale for each block of 256

OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        build=build_adamw,
        summary="torch AdamW, fused where torch can",
        state_bytes=lambda weight: 2 * weight,
    ),
    "sgd": OptimizerRow(
        build=build_sgd,
        summary="torch SGD with momentum",
        state_bytes=lambda weight: weight,
    ),
    "adafactor": OptimizerRow(
        build=build_adafactor,
        summary="second moment as one row and one column a matrix, no first moment",
        state_bytes=lambda weight: 0,
    ),
    "lion": OptimizerRow(
        build=Lion,
        summary="sign of an interpolated momentum; learning rate 3 to 10 times below AdamW's",
        state_bytes=lambda weight: weight,
    ),
    "adamw_bnb_8bit": OptimizerRow(
        build=bitsandbytes_builder("AdamW", bits=8, paged=False),
        summary="AdamW with 8-bit state, embeddings in 32 bits",
        state_bytes=lambda weight: 2 * _BLOCKWISE_8BIT,
        needs_bitsandbytes=True,
        devices=("cuda", "xpu", "cpu"),
    ),
    "paged_adamw_32bit": OptimizerRow(
        build=bitsandbytes_builder("AdamW", bits=32, paged=True),
        summary="AdamW with float32 state in memory that spills to the host",
        state_bytes=lambda weight: 8,
        needs_bitsandbytes=True,
        devices=("cuda",),
    ),
    "paged_adamw_8bit": OptimizerRow(
        build=bitsandbytes_builder("AdamW", bits=8, paged=True),
        summary="AdamW with 8-bit state in memory that spills to the host, embeddings in 32 bits",
        state_bytes=lambda weight: 2 * _BLOCKWISE_8BIT,
        needs_bitsandbytes=True,
        devices=("cuda",),
        elsewhere="adamw_bnb_8bit",
    ),
    "lion_32bit": OptimizerRow(
        build=bitsandbytes_builder("Lion", bits=32, paged=False),
        summary="Lion with float32 momentum whatever the weights are",
        state_bytes=lambda weight: 4,
        needs_bitsandbytes=True,
        devices=("cuda", "xpu", "cpu"),
        elsewhere="lion",
    ),
    "lion_8bit": OptimizerRow(
        build=bitsandbytes_builder("Lion", bits=8, paged=False),
        summary="Lion with 8-bit momentum, embeddings in 32 bits",
        state_bytes=lambda weight: _BLOCKWISE_8BIT,
        needs_bitsandbytes=True,
        devices=("cuda", "xpu", "cpu"),
        elsewhere="lion",
    ),
    "paged_lion_32bit": OptimizerRow(
        build=bitsandbytes_builder("Lion", bits=32, paged=True),
        summary="Lion with float32 momentum in memory that spills to the host",
        state_bytes=lambda weight: 4,
        needs_bitsandbytes=True,
        devices=("cuda",),
        elsewhere="lion_32bit",
    ),
    "paged_lion_8bit": OptimizerRow(
        build=bitsandbytes_builder("Lion", bits=8, paged=True),
        summary="Lion with 8-bit momentum in memory that spills to the host, embeddings in 32 bits",
        state_bytes=lambda weight: _BLOCKWISE_8BIT,
        needs_bitsandbytes=True,
        devices=("cuda",),
        elsewhere="lion_8bit",
    ),
}


def check_optimizer(config: OptimizerConfig, device: torch.device) -> None:
    """Refuse an optimizer that cannot run here, before a model is loaded for it.

    Args:
        config: the optimizer and its hyperparameters.
        device: where the trained weights will be.

    Raises:
        UserError: naming every hyperparameter that is out of range or that the optimizer does not have, a device
            it does not run on, and bitsandbytes if it is needed and not installed.
    """
    problems = [
        *config.problems(),
        *_wrong_device(config, device),
        *_missing_package(config),
    ]
    if problems:
        raise UserError(*problems)


def _wrong_device(config: OptimizerConfig, device: torch.device) -> list[str]:
    row = OPTIMIZERS[config.name]
    if row.devices is None or kernels_of(device) in row.devices:
        return []
    return [
        f"optimizer.name={config.name} runs on {', '.join(row.devices)}, got device {device.type}. "
        f"Set optimizer.name={row.elsewhere}."
    ]


def _missing_package(config: OptimizerConfig) -> tuple[str, ...]:
    if not OPTIMIZERS[config.name].needs_bitsandbytes or is_bitsandbytes_installed():
        return ()
    return MissingPackageError(f"optimizer.name={config.name}", "bitsandbytes", "bitsandbytes").problems
