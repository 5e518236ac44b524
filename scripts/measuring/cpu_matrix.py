"""Runs for a CPU: every family with every way to train it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping

from measuring.families import FAMILIES

from lowmem_ft.optimizers.table import OPTIMIZERS

Choice = tuple[str, ...]
"""Settings as a user types them; the caller adds the model's folder."""

FACTORS: dict[str, dict[str, Choice]] = {
    "family": {name: (f"model={name}",) for name in FAMILIES},
    "optimizer": {
        name: (f"optimizer.name={name}",)
        for name, row in OPTIMIZERS.items()
        if row.devices is None or "cpu" in row.devices
    },
    "precision": {
        "fp32": (),
        "autocast": ("training.mixed_precision=bf16",),
        "bf16": ("model.dtype=bfloat16",),
        "bf16-autocast": ("model.dtype=bfloat16", "training.mixed_precision=bf16"),
    },
    "checkpointing": {
        "kept": ("checkpointing.mode=none",),
        "recomputed": ("checkpointing.mode=full",),
        "half": ("checkpointing.mode=full", "checkpointing.every_n_layers=2"),
    },
    "loss": {"plain": ("loss.chunk_tokens=null",), "chunked": ("loss.chunk_tokens=48",)},
    "attention": {"sdpa": ("model.attn_implementation=sdpa",), "eager": ("model.attn_implementation=eager",)},
    "window": {
        "one": ("training.gradient_accumulation_steps=1",),
        "three": ("training.gradient_accumulation_steps=3",),
    },
    "rows": {
        "1x96": ("training.per_device_train_batch_size=1", "data.max_length=96", "data.packing=false"),
        "3x64": ("training.per_device_train_batch_size=3", "data.max_length=64", "data.packing=false"),
        "2x72-packed": ("training.per_device_train_batch_size=2", "data.max_length=72", "data.packing=true"),
    },
    "clipping": {"clipped": (), "unclipped": ("training.max_grad_norm=null",)},
    "evaluation": {
        "none": ("data.eval_size=null",),
        "same": ("data.eval_size=8",),
        "wider": ("data.eval_size=8", "training.per_device_eval_batch_size=4"),
    },
}

ALWAYS: Choice = ("model.weights=random", "training.use_cpu=true", "data=any")

Levels = Mapping[str, str]
"""For each factor, one of its choices."""


def overrides_of(levels: Levels) -> Choice:
    """Return the settings of one run."""
    return (*ALWAYS, *itertools.chain.from_iterable(FACTORS[f][level] for f, level in levels.items()))


def name_of(levels: Levels) -> str:
    """Return the choices in a row, which name a run."""
    return " ".join(levels.values())


def is_possible(levels: Levels) -> bool:
    """Return whether the family can train so: Gemma 2 caps attention scores, which torch's sdpa does not support."""
    return not (levels.get("family") == "gemma2" and levels.get("attention") == "sdpa")


def sample(count: int, seed: int) -> list[Levels]:
    """Draw distinct runs from the full product."""
    generator = random.Random(seed)
    drawn: dict[str, Levels] = {}
    while len(drawn) < count:
        levels = {factor: generator.choice(sorted(choices)) for factor, choices in FACTORS.items()}
        if is_possible(levels):
            drawn[name_of(levels)] = levels
    return list(drawn.values())
