"""Which optimizer a run uses, and its hyperparameters; the rows behind the names are in ``table.py``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowmem_ft.knob import knob


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
        frees="of AdamW's 8 bytes a float32 parameter: 8bit AdamW 6, lion 4, lion_8bit 7, adafactor all 8",
        costs="8bit: state rounded to 256 levels; lion and adafactor: other mathematics and learning rates",
    )
    betas: tuple[float, float] | None = knob(
        None, "Decay of the running averages; null: 0.9, 0.999 for AdamW and 0.9, 0.99 for Lion."
    )
    eps: float | None = knob(None, "AdamW's term against division by zero; null: 1e-8.")
    momentum: float | None = knob(None, "Momentum of sgd, 0 keeps no state; null: 0.9.")
    weight_decay: float = knob(
        0.0, "Decoupled decay of weights (sgd: L2 penalty), spared on biases and norms."
    )
