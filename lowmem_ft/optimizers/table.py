"""The optimizers, one row each. A new one adds a row here, and its name and hyperparameters in ``config.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from lowmem_ft.devices import kernels_of
from lowmem_ft.errors import MissingPackageError, UserError
from lowmem_ft.optimizers.adafactor import Adafactor
from lowmem_ft.optimizers.adamw import AdamW
from lowmem_ft.optimizers.bitsandbytes_optimizers import bitsandbytes_builder, is_bitsandbytes_installed
from lowmem_ft.optimizers.chunked_optimizer import ChunkedOptimizer
from lowmem_ft.optimizers.config import OptimizerConfig
from lowmem_ft.optimizers.lion import Lion
from lowmem_ft.optimizers.sgd import SGD
from lowmem_ft.optimizers.update_rule import UpdateRule, WholeParameterRule


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """One optimizer of the table: ours by its rule, bitsandbytes' by its builder.

    Args:
        summary: one line for people.
        state_bytes: bytes of state a parameter, given those of one running average (see ``state_formats``).
        rule: the update, in any format of weights and state.
        build: takes parameter groups, ``lr`` and the optimizer's hyperparameters.
        devices: device types it runs on; None is all of them.
        elsewhere: the name to suggest on other devices.
    """

    summary: str
    state_bytes: Callable[[float], float]
    rule: UpdateRule | WholeParameterRule | None = None
    build: Callable[..., Optimizer] | None = None
    devices: tuple[str, ...] | None = None
    elsewhere: str = "adamw"

    @property
    def needs_bitsandbytes(self) -> bool:
        """Whether the package must be installed."""
        return self.build is not None

    def create(
        self, groups: list[dict[str, Any]], config: OptimizerConfig, *, learning_rate: float, seed: int
    ) -> Optimizer:
        """The optimizer over parameter groups, each with its ``weight_decay``."""
        defaults = {"lr": learning_rate, **config.hyperparameters()}
        if self.rule is None:
            assert self.build is not None
            return self.build(groups, **defaults)
        return ChunkedOptimizer(
            groups, self.rule, defaults, state=config.state, master=config.master, seed=seed
        )


_BLOCKWISE_8BIT = 1 + 4 / 256  # a byte an element, and a float32 scale for each block of 256

OPTIMIZERS: dict[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        rule=AdamW(),
        summary="two running averages",
        state_bytes=lambda average: 2 * average,
    ),
    "sgd": OptimizerRow(
        rule=SGD(),
        summary="momentum alone",
        state_bytes=lambda average: average,
    ),
    "adafactor": OptimizerRow(
        rule=Adafactor(),
        summary="second moment as one row and one column a matrix, no first moment",
        state_bytes=lambda average: 0,
    ),
    "lion": OptimizerRow(
        rule=Lion(),
        summary="sign of an interpolated momentum; learning rate 3 to 10 times below AdamW's",
        state_bytes=lambda average: average,
    ),
    "adamw_bnb_8bit": OptimizerRow(
        build=bitsandbytes_builder("AdamW", bits=8, paged=False),
        summary="AdamW with 8-bit state, embeddings in 32 bits",
        state_bytes=lambda average: 2 * _BLOCKWISE_8BIT,
        devices=("cuda", "xpu", "cpu"),
    ),
    "paged_adamw_32bit": OptimizerRow(
        build=bitsandbytes_builder("AdamW", bits=32, paged=True),
        summary="AdamW with float32 state in memory that spills to the host",
        state_bytes=lambda average: 8,
        devices=("cuda",),
    ),
    "paged_adamw_8bit": OptimizerRow(
        build=bitsandbytes_builder("AdamW", bits=8, paged=True),
        summary="AdamW with 8-bit state in memory that spills to the host, embeddings in 32 bits",
        state_bytes=lambda average: 2 * _BLOCKWISE_8BIT,
        devices=("cuda",),
        elsewhere="adamw_bnb_8bit",
    ),
    "lion_32bit": OptimizerRow(
        build=bitsandbytes_builder("Lion", bits=32, paged=False),
        summary="Lion with float32 momentum whatever the weights are",
        state_bytes=lambda average: 4,
        devices=("cuda", "xpu", "cpu"),
        elsewhere="lion",
    ),
    "lion_8bit": OptimizerRow(
        build=bitsandbytes_builder("Lion", bits=8, paged=False),
        summary="Lion with 8-bit momentum, embeddings in 32 bits",
        state_bytes=lambda average: _BLOCKWISE_8BIT,
        devices=("cuda", "xpu", "cpu"),
        elsewhere="lion",
    ),
    "paged_lion_32bit": OptimizerRow(
        build=bitsandbytes_builder("Lion", bits=32, paged=True),
        summary="Lion with float32 momentum in memory that spills to the host",
        state_bytes=lambda average: 4,
        devices=("cuda",),
        elsewhere="lion_32bit",
    ),
    "paged_lion_8bit": OptimizerRow(
        build=bitsandbytes_builder("Lion", bits=8, paged=True),
        summary="Lion with 8-bit momentum in memory that spills to the host, embeddings in 32 bits",
        state_bytes=lambda average: _BLOCKWISE_8BIT,
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
