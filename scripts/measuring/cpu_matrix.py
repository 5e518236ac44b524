"""Runs for a CPU: every family with every way to train it, or few runs that show every pair of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping

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


def covering(seed: int = 0) -> list[Levels]:
    """Return few runs in which any two choices of different factors meet at least once.

    Greedy: each run begins with a pair that no run has yet, and takes for each further factor the choice that meets
        most
    such pairs.
    """
    generator = random.Random(seed)
    missing = {frozenset(pair) for pair in _pairs(_items(FACTORS)) if is_possible(dict(pair))}
    runs: list[Levels] = []
    while missing:
        first = min(missing, key=sorted)
        levels = dict(first)
        for factor in generator.sample(sorted(FACTORS), len(FACTORS)):
            if factor not in levels:
                levels[factor] = _best_choice(factor, levels, missing)
        missing -= {frozenset(pair) for pair in itertools.combinations(levels.items(), 2)}
        runs.append({factor: levels[factor] for factor in FACTORS})
    return runs


def sample(count: int, seed: int) -> list[Levels]:
    """Draw distinct runs from the full product."""
    generator = random.Random(seed)
    drawn: dict[str, Levels] = {}
    while len(drawn) < count:
        levels = {factor: generator.choice(sorted(choices)) for factor, choices in FACTORS.items()}
        if is_possible(levels):
            drawn[name_of(levels)] = levels
    return list(drawn.values())


def _items(factors: Mapping[str, Mapping[str, Choice]]) -> list[tuple[str, str]]:
    return [(factor, choice) for factor, choices in factors.items() for choice in choices]


def _pairs(items: Iterable[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    return (pair for pair in itertools.combinations(items, 2) if pair[0][0] != pair[1][0])


def _best_choice(factor: str, levels: Levels, missing: set[frozenset[tuple[str, str]]]) -> str:
    possible = [choice for choice in FACTORS[factor] if is_possible({**levels, factor: choice})]
    return max(
        possible,
        key=lambda choice: sum(frozenset([(factor, choice), item]) in missing for item in levels.items()),
    )
