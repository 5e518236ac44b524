"""Every technique of the memory ladder, and which of their choices go together.

The capabilities of an optimizer come from its row, and a technique's needs of checkpointing from its knob. Other
incompatibilities are listed twice: by the recipe's own rules (``recipe/rules/conflicts.py``), which refuse them, and
here by ``NEEDS``, which steers the search of runs (``covering.py``). A test compares the two.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import get_args

from measuring.cpu_matrix import Choice, Levels

from lowmem_ft.foundation.knob import Checkpointed, Effect
from lowmem_ft.optimizers.table import Capability, optimizers_that
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.reading.overrides import parse_overrides
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig

FACTORS: dict[str, dict[str, Choice]] = {
    "family": {name: (f"model={name}",) for name in ("llama", "qwen2", "gemma2", "gpt2", "qwen3_moe")},
    "optimizer": {
        name: (f"optimizer.name={name}",) for name in (*optimizers_that("takes_formats"), "adamw_bnb_8bit")
    },
    "weights": {
        "fp32": (),
        "fp32-autocast": ("training.mixed_precision=bf16",),
        **{
            f"bf16-{master}": ("model.dtype=bfloat16", f"optimizer.master={master}")
            for master in ("fp32", "split16", "split24", "stochastic_rounding", "none")
        },
    },
    "state": {kind: (f"optimizer.state={kind}",) for kind in ("fp32", "bf16", "8bit")},
    "update": {"after": (), "in_backward": ("optimizer.in_backward=true",)},
    "optimizer_home": {home: (f"offload.optimizer={home}",) for home in ("device", "host")},
    "parameters": {
        "device": (),
        "stream": ("offload.parameters=stream",),
        "stream-1": ("offload.parameters=stream", "offload.resident_layers=1"),
    },
    "activations": {kind: (f"offload.activations={kind}",) for kind in ("none", "inputs", "all")},
    "checkpointing": {
        "none": (),
        "full": ("checkpointing.mode=full",),
        "selective": ("checkpointing.mode=selective",),
        "half": ("checkpointing.mode=full", "checkpointing.every_n_layers=2"),
    },
    "window": {
        "one": (),
        "three": ("training.gradient_accumulation_steps=3",),
        "three-vertical": ("training.gradient_accumulation_steps=3", "accumulation.order=vertical"),
    },
    "sums": {"rounded": (), "fused": ("accumulation.fusion=true",)},
    "loss": {
        "plain": ("loss.chunk_tokens=null",),
        "chunked": ("loss.chunk_tokens=48",),
        "tiled": ("loss.chunk_tokens=48", "tiling.head=3"),
    },
    "mlp": {"whole": (), "tiled": ("tiling.mlp=2",)},
    "mlp_activation": {"kept": (), "recomputed": ("checkpointing.mlp_activation=recompute",)},
    "adapter": {
        "none": (),
        "lora": ("adapter.name=lora", "adapter.r=4"),
        "dora": ("adapter.name=lora", "adapter.r=4", "adapter.use_dora=true"),
        "qlora": ("adapter.name=lora", "adapter.r=4", "model.quantization=nf4"),
    },
    "clipping": {"clipped": ("training.max_grad_norm=0.5",), "unclipped": ("training.max_grad_norm=null",)},
    "rows": {
        "2x64": ("data.max_length=64", "data.packing=false"),
        "2x72-packed": ("data.max_length=72", "data.packing=true"),
    },
}

Needs = tuple[str, str, Mapping[str, set[str]]]
"""A factor, one of its choices, and the choices of other factors that it needs."""


def _optimizers(capability: Capability) -> dict[str, set[str]]:
    return {"optimizer": set(optimizers_that(capability)) & FACTORS["optimizer"].keys()}


def _checkpointing(need: Checkpointed) -> dict[str, set[str]]:
    """Return the choices of checkpointing that satisfy a need."""
    levels: tuple[Checkpointed, ...] = get_args(Checkpointed)
    enough = levels[levels.index(need) :]
    configs = {
        choice: CheckpointingConfig(**parse_overrides(settings)[0].get("checkpointing", {}))
        for choice, settings in FACTORS["checkpointing"].items()
    }
    return {"checkpointing": {choice for choice, config in configs.items() if config.checkpointed in enough}}


def effects_of(settings: Choice) -> Iterator[Effect]:
    """Yield the effect of each of the settings, by its knob."""
    for group, values in parse_overrides(settings)[0].items():
        yield from (recipe_keys()[f"{group}.{name}"].effect_of(value) for name, value in values.items())


def _needs_of_knobs() -> Iterator[Needs]:
    for factor, choices in FACTORS.items():
        for choice, settings in choices.items():
            for effect in effects_of(settings):
                if effect.needs_checkpointed != "no layer":
                    yield factor, choice, _checkpointing(effect.needs_checkpointed)


NEEDS: tuple[Needs, ...] = (
    *_needs_of_knobs(),
    ("update", "in_backward", {**_optimizers("steps_in_backward"), "window": {"one", "three-vertical"}}),
    ("optimizer_home", "host", _optimizers("moves_state_by_chunks")),
    *(("state", kind, _optimizers("takes_state_formats")) for kind in ("bf16", "8bit")),
    *(
        ("weights", f"bf16-{master}", {"adapter": {"none"}, **_optimizers("takes_formats")})
        for master in ("split16", "split24", "stochastic_rounding", "none")
    ),
    ("mlp_activation", "recomputed", {"activations": {"none", "inputs"}}),
    (
        "sums",
        "fused",
        {"adapter": {"none"}, "weights": {name for name in FACTORS["weights"] if name.startswith("bf16")}},
    ),
)
"""Needs of a choice, whatever else is chosen."""

_STREAMED: dict[str, set[str]] = {
    **_checkpointing("every layer"),
    **_optimizers("updates_by_slices"),
    "update": {"in_backward"},
    "optimizer_home": {"host"},
    "window": {"one", "three-vertical"},
}
"""Needs of streamed weights, if they are trained."""

NOT_WITH_FAMILY: set[tuple[str, str, str]] = {
    (
        "checkpointing",
        "selective",
        "gemma2",
    ),  # caps attention scores, which torch's sdpa does not support
    ("sums", "fused", "gpt2"),  # its layers are no nn.Linear; its head alone is one, until it is streamed
    ("mlp_activation", "recomputed", "qwen3_moe"),  # its experts are one tensor
    ("adapter", "dora", "qwen3_moe"),  # PEFT has no DoRA for experts that are one tensor
}
"""Choices that only the model refuses, once it is loaded."""

KEEPS_EVERY_BIT = ("update", "optimizer_home", "parameters", "activations", "checkpointing", "mlp_activation")
"""Factors that change where bytes are stored and when they are computed, but no number."""

CHANGES_THE_ORDER_OF_SUMS = ("window", "sums", "loss", "mlp")
"""Factors that add the same numbers in another order, or round some of them less."""


def is_possible(levels: Levels) -> bool:
    """Return whether recipe and model allow these choices, all of them or some."""
    return is_allowed(levels) and not any(
        levels.get(factor) == choice and levels.get("family") == family
        for factor, choice, family in NOT_WITH_FAMILY
    )


def is_allowed(levels: Levels) -> bool:
    """Return whether the recipe's rules allow these choices."""
    for factor, choice, needed in NEEDS:
        if levels.get(factor) == choice and any(
            other in levels and levels[other] not in allowed for other, allowed in needed.items()
        ):
            return False
    return _streaming_is_possible(levels)


def _streaming_is_possible(levels: Levels) -> bool:
    """Check the needs of streamed weights; a frozen base has none."""
    if levels.get("parameters", "device") == "device" or levels.get("adapter") != "none":
        return True
    return all(factor not in levels or levels[factor] in allowed for factor, allowed in _STREAMED.items())


def plain(levels: Levels) -> Levels:
    """Return the same mathematics without any technique that only moves bytes or reorders sums."""
    first = {factor: next(iter(choices)) for factor, choices in FACTORS.items()}
    replaced = {*KEEPS_EVERY_BIT, *CHANGES_THE_ORDER_OF_SUMS}
    result = {factor: first[factor] if factor in replaced else level for factor, level in levels.items()}
    return {**result, "window": levels["window"].removesuffix("-vertical")}


def overrides_of(levels: Levels) -> Choice:
    """Return the settings of one run."""
    always = (
        "model.weights=random",
        "training.use_cpu=true",
        "data=any",
        "training.per_device_train_batch_size=2",
    )
    return (*always, *itertools.chain.from_iterable(FACTORS[f][level] for f, level in levels.items()))


def random_levels(generator: random.Random) -> Levels:
    """Draw a choice of each factor, whether they are compatible or not."""
    return {factor: generator.choice(list(choices)) for factor, choices in FACTORS.items()}
