"""The optimizers, one row each: their updates, hyperparameters and capabilities.

Recipes are checked by these rows before torch is imported, so a row names its update and does not hold it. A new
optimizer adds its name to :data:`OptimizerName` and a row to :data:`OPTIMIZERS`; nothing else lists optimizers:
``config.py`` builds the help texts from the rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lowmem_ft.foundation.knob import NO_EFFECT, Effect

if TYPE_CHECKING:
    from lowmem_ft.optimizers.updates.update_rule import UpdateRule, WholeParameterRule

OptimizerName = Literal[
    "adamw",
    "sgd",
    "adafactor",
    "lion",
    "adamw_bnb_8bit",
    "paged_adamw_32bit",
    "paged_adamw_8bit",
    "lion_32bit",
    "lion_8bit",
    "paged_lion_32bit",
    "paged_lion_8bit",
]
"""Names that a recipe may use. A type checker checks the keys of :data:`OPTIMIZERS` against it, a test the reverse."""

StateName = Literal["fp32", "bf16", "8bit"]

DEFAULT_OPTIMIZER: OptimizerName = "adamw"

AVERAGE_BYTES: Mapping[StateName, float] = {"fp32": 4, "bf16": 2, "8bit": 1 + 4 / 256}
"""Bytes per element of a running average; 8 bits have a float32 scale for each block of 256."""

MasterName = Literal["fp32", "split16", "split24", "stochastic_rounding", "none"]

MASTER_BYTES: Mapping[MasterName, int] = {
    "fp32": 4,
    "split16": 2,
    "split24": 1,
    "stochastic_rounding": 0,
    "none": 0,
}
"""Bytes per element of what is kept next to a 16-bit weight; a float32 weight is its own master."""

StateFormats = StateName | Mapping[str, StateName]
"""The format of all running averages, or formats by the names of averages; one that is not named is in fp32."""

Capability = Literal[
    "takes_formats", "takes_state_formats", "steps_in_backward", "moves_state_by_chunks", "updates_by_slices"
]
"""Capabilities of a row that rules check."""


@dataclass(frozen=True, kw_only=True)
class Bitsandbytes:
    """An optimizer of bitsandbytes: its class, the bits of its state, and whether that is in managed memory."""

    algorithm: Literal["AdamW", "Lion"]
    bits: Literal[8, 32]
    paged: bool = False


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """One optimizer of the table: ours, with its rule, or one of bitsandbytes'.

    An update that works on any chunk of a parameter, at any time, has all the capabilities; those are the defaults.

    Args:
        summary: one line for users.
        hyperparameters: those in addition to learning rate and weight decay, and their defaults.
        averages: names of the running averages of each element; those of torch's optimizers where it has them.
        stateless_at_zero: the hyperparameter whose value 0 leaves it without running averages; None for most
            optimizers.
        effect: its cost, and whether it is AdamW's mathematics.
        rule: its update, as ``module:name``: a class of one of the kinds in ``update_rule.py``, made without
            arguments.
        bitsandbytes: which of bitsandbytes' optimizers it is, if it has no rule.
        devices: device types that it runs on; None: all.
        elsewhere: the name to suggest on other devices.
        stand_in: the name to suggest for a capability that it lacks.
        takes_formats: whether it keeps state and master weights in every format.
        steps_in_backward: whether it updates one weight while backward still computes the gradients of others.
        moves_state_by_chunks: whether its state may be kept in host memory and streamed through the device chunk by
            chunk.
        updates_by_slices: whether it updates a weight from parts of its gradient, one after the other.
    """

    summary: str
    hyperparameters: Mapping[str, Any]
    averages: tuple[str, ...]
    stateless_at_zero: str | None = None
    effect: Effect = NO_EFFECT
    rule: str | None = None
    bitsandbytes: Bitsandbytes | None = None
    devices: tuple[str, ...] | None = None
    elsewhere: OptimizerName = DEFAULT_OPTIMIZER
    stand_in: OptimizerName | None = None
    takes_formats: bool = True
    steps_in_backward: bool = True
    moves_state_by_chunks: bool = True
    updates_by_slices: bool = True

    @property
    def takes_state_formats(self) -> bool:
        """True if there are running averages of each element that can be kept in every format."""
        return self.takes_formats and bool(self.averages)

    def update_rule(self) -> UpdateRule | WholeParameterRule:
        """Return the update of an optimizer of ours; imports torch."""
        assert self.rule is not None
        module, _, name = self.rule.partition(":")
        return getattr(importlib.import_module(module), name)()

    def state_bytes(self, state: StateFormats = "fp32") -> float:
        """Return the bytes of state for each element, with its averages in these formats if it takes any."""
        if self.bitsandbytes is not None:
            state = "8bit" if self.bitsandbytes.bits == 8 else "fp32"
        return sum(AVERAGE_BYTES[format_of(state, average)] for average in self.averages)


def format_of(state: StateFormats, average: str) -> StateName:
    """Return the format of one running average."""
    return state if isinstance(state, str) else state.get(average, "fp32")


def optimizers_that(capability: Capability) -> tuple[str, ...]:
    """Return the names of the optimizers with a capability, in the table's order."""
    return tuple(name for name, row in OPTIMIZERS.items() if getattr(row, capability))


def listed(names: tuple[str, ...], word: str) -> str:
    """List names in words: ``a, b or c``."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


def _row_of_bitsandbytes(
    form: Bitsandbytes,
    summary: str,
    devices: tuple[str, ...] = ("cuda",),
    elsewhere: OptimizerName = DEFAULT_OPTIMIZER,
) -> OptimizerRow:
    """Return the row of one that has its own formats, and steps over whole parameters after backward."""
    ours: OptimizerName = "adamw" if form.algorithm == "AdamW" else "lion"
    # 8-bit state is rounded to nearest: smaller changes of an average are lost, in every step again.
    is_exact = form.algorithm == "AdamW" and form.bits == 32
    return OptimizerRow(
        summary=summary,
        hyperparameters=_HYPERPARAMETERS[form.algorithm],
        averages=("exp_avg", "exp_avg_sq") if form.algorithm == "AdamW" else ("momentum",),
        effect=Effect(
            cost="host link" if form.paged else "nothing",
            fidelity="exact" if is_exact else "other mathematics",
            engines=("ddp",),
        ),
        bitsandbytes=form,
        devices=devices,
        elsewhere=elsewhere,
        stand_in=ours,
        takes_formats=False,
        steps_in_backward=False,
        moves_state_by_chunks=False,
        updates_by_slices=False,
    )


_HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.9, 0.999), "eps": 1e-8},
    "Lion": {"betas": (0.9, 0.99)},
}
_NOT_PAGED = ("cuda", "xpu", "cpu")

OPTIMIZERS: dict[OptimizerName, OptimizerRow] = {
    "adamw": OptimizerRow(
        rule="lowmem_ft.optimizers.updates.adamw:AdamW",
        summary="two running averages",
        hyperparameters=_HYPERPARAMETERS["AdamW"],
        averages=("exp_avg", "exp_avg_sq"),
    ),
    "sgd": OptimizerRow(
        rule="lowmem_ft.optimizers.updates.sgd:SGD",
        summary="momentum alone",
        hyperparameters={"momentum": 0.9},
        averages=("momentum_buffer",),
        stateless_at_zero="momentum",
        effect=Effect(fidelity="other mathematics"),
    ),
    "adafactor": OptimizerRow(
        rule="lowmem_ft.optimizers.updates.adafactor:Adafactor",
        summary="one row and one column a matrix for the second moment, no first moment",
        hyperparameters={},
        averages=(),
        effect=Effect(fidelity="other mathematics", engines=("ddp",)),  # it measures whole parameters
        updates_by_slices=False,  # it reads the whole gradient of a parameter first
    ),
    "lion": OptimizerRow(
        rule="lowmem_ft.optimizers.updates.lion:Lion",
        summary="sign of an interpolated momentum; learning rate 3 to 10 times below AdamW's",
        hyperparameters=_HYPERPARAMETERS["Lion"],
        averages=("momentum",),
        effect=Effect(fidelity="other mathematics"),
    ),
    "adamw_bnb_8bit": _row_of_bitsandbytes(
        Bitsandbytes(algorithm="AdamW", bits=8),
        "AdamW with 8-bit state, embeddings in 32 bits",
        devices=_NOT_PAGED,
    ),
    "paged_adamw_32bit": _row_of_bitsandbytes(
        Bitsandbytes(algorithm="AdamW", bits=32, paged=True),
        "AdamW with float32 state in memory that spills to the host",
    ),
    "paged_adamw_8bit": _row_of_bitsandbytes(
        Bitsandbytes(algorithm="AdamW", bits=8, paged=True),
        "AdamW with 8-bit state in memory that spills to the host, embeddings in 32 bits",
        elsewhere="adamw_bnb_8bit",
    ),
    "lion_32bit": _row_of_bitsandbytes(
        Bitsandbytes(algorithm="Lion", bits=32),
        "Lion with float32 momentum for weights of any type",
        devices=_NOT_PAGED,
        elsewhere="lion",
    ),
    "lion_8bit": _row_of_bitsandbytes(
        Bitsandbytes(algorithm="Lion", bits=8),
        "Lion with 8-bit momentum, embeddings in 32 bits",
        devices=_NOT_PAGED,
        elsewhere="lion",
    ),
    "paged_lion_32bit": _row_of_bitsandbytes(
        Bitsandbytes(algorithm="Lion", bits=32, paged=True),
        "Lion with float32 momentum in memory that spills to the host",
        elsewhere="lion_32bit",
    ),
    "paged_lion_8bit": _row_of_bitsandbytes(
        Bitsandbytes(algorithm="Lion", bits=8, paged=True),
        "Lion with 8-bit momentum in memory that spills to the host, embeddings in 32 bits",
        elsewhere="lion_8bit",
    ),
}
