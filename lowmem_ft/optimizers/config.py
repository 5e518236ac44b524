"""Which optimizer a run uses, and its hyperparameters; the rows behind the names are in ``table.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_ft.knob import knob

_ADAMW: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8}
_LION: dict[str, Any] = {"betas": (0.9, 0.99)}

HYPERPARAMETERS: dict[str, dict[str, Any]] = {
    "adamw": _ADAMW,
    "sgd": {"momentum": 0.9},
    "adafactor": {},
    "lion": _LION,
    "adamw_bnb_8bit": _ADAMW,
    "paged_adamw_32bit": _ADAMW,
    "paged_adamw_8bit": _ADAMW,
    "lion_32bit": _LION,
    "lion_8bit": _LION,
    "paged_lion_32bit": _LION,
    "paged_lion_8bit": _LION,
}
"""What each optimizer takes beside learning rate and weight decay, and its defaults."""

OWN_OPTIMIZERS = ("adamw", "sgd", "adafactor", "lion")
"""Those that are not bitsandbytes': they keep weights and state in any format, and step in backward too."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer by name and its hyperparameters; the learning rate is ``training.learning_rate``.

    A hyperparameter left at null takes the optimizer's own default; one it does not have is refused.
    """

    name: Literal[
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
    ] = knob(
        "adamw",
        "Optimizer; 8bit and 32bit ones are bitsandbytes', paged ones spill to host memory (CUDA only).",
        frees="of AdamW's 8 bytes a parameter: 8bit AdamW 6, lion and sgd 4, lion_8bit 7, adafactor all 8",
        costs="8bit: state rounded to 256 levels; lion, sgd and adafactor: other mathematics and learning rates",
    )
    betas: tuple[float, float] | None = knob(
        None, "Decay of the running averages; null: 0.9, 0.999 for AdamW and 0.9, 0.99 for Lion."
    )
    eps: float | None = knob(None, "AdamW's term against division by zero; null: 1e-8.")
    momentum: float | None = knob(None, "Momentum of sgd, 0 keeps no state; null: 0.9.")
    state: Literal["fp32", "bf16", "8bit"] = knob(
        "fp32",
        "How adamw, sgd, adafactor and lion keep their running averages.",
        frees="8bit: 6 of AdamW's 8 bytes a parameter; bf16: 4",
        costs="values rounded at random, without bias, by up to 1/8 of themselves (8bit) or 1/128 (bf16)",
    )
    master: Literal["fp32", "split16", "split24", "stochastic_rounding", "none"] = knob(
        "fp32",
        "What bfloat16 weights keep beside them, so that small updates are not lost; split16 and fp32 are exact.",
        frees="of fp32's 4 bytes a parameter beside the weight: split16 2, split24 3, stochastic_rounding and none 4",
        costs="split24: 24 of 32 bits, without bias; stochastic_rounding: noise; none: small updates are lost",
    )
    in_backward: bool = knob(
        False,
        "Update each weight as soon as backward has finished its gradient, or keep the gradient compactly until then.",
        frees="the gradients but those of one layer (without clipping), or all of them with offload to the host",
    )
    weight_decay: float = knob(
        0.0, "Decoupled decay of weights (sgd: L2 penalty), spared on biases and norms."
    )

    def hyperparameters(self) -> dict[str, Any]:
        """What the optimizer is built with beside rate and decay: the values set here over its own defaults."""
        return {
            name: default if getattr(self, name) is None else getattr(self, name)
            for name, default in HYPERPARAMETERS[self.name].items()
        }

    def problems(self) -> list[str]:
        """What is wrong with these values on any device: not taken by the optimizer, or out of range."""
        return [*_unused(self), *_formats_of_others(self), *_out_of_range(self)]


def _unused(config: OptimizerConfig) -> Iterator[str]:
    for name in ("betas", "eps", "momentum"):
        if getattr(config, name) is not None and name not in HYPERPARAMETERS[config.name]:
            takes_it = next(other for other, taken in HYPERPARAMETERS.items() if name in taken)
            yield (
                f"optimizer.{name} is not taken by optimizer.name={config.name}, got {getattr(config, name)}. "
                f"Remove it or set optimizer.name={takes_it}."
            )


def _formats_of_others(config: OptimizerConfig) -> Iterator[str]:
    """Bitsandbytes' optimizers have formats of their own, and step over whole parameters after backward."""
    if config.name in OWN_OPTIMIZERS:
        return
    for field, value, default in (
        ("state", config.state, "fp32"),
        ("master", config.master, "fp32"),
        ("in_backward", str(config.in_backward).lower(), "false"),
    ):
        if value != default:
            yield (
                f"optimizer.{field}={value} needs optimizer.name={'|'.join(OWN_OPTIMIZERS)}, got {config.name}. "
                f"Set optimizer.name={'lion' if 'lion' in config.name else 'adamw'} or optimizer.{field}={default}."
            )


def _out_of_range(config: OptimizerConfig) -> Iterator[str]:
    if config.betas is not None and not all(0 <= beta < 1 for beta in config.betas):
        yield f"optimizer.betas are two numbers from 0 to below 1, got {list(config.betas)}. Try [0.9, 0.999]."
    if config.momentum is not None and not 0 <= config.momentum < 1:
        yield f"optimizer.momentum is from 0 to below 1, got {config.momentum}. Try 0.9."
    if config.eps is not None and not (config.eps > 0 and math.isfinite(config.eps)):
        yield f"optimizer.eps is finite and above 0, got {config.eps}. Try 1e-8."
    if not (config.weight_decay >= 0 and math.isfinite(config.weight_decay)):
        yield f"optimizer.weight_decay is finite and 0 or more, got {config.weight_decay}. Try 0.01."
