"""What to change in a recipe that needs too much device memory: the cheapest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lowmem_ft.recipe import Recipe

SHORTEST_LENGTH = 512
"""Tokens of a row below which no suggestion goes."""


@dataclass(frozen=True, kw_only=True)
class WayOut:
    """A change of settings that needs less memory, and what it does.

    Args:
        settings: new values by dotted key.
        why: what it frees, or what it costs, in a clause.
    """

    settings: Mapping[str, Any]
    why: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as they are typed."""
        return tuple(f"{key}={value}" for key, value in self.settings.items())

    @property
    def overrides_text(self) -> str:
        """The same on one line."""
        return " ".join(self.overrides)

    def applied_to(self, recipe: Recipe) -> Recipe:
        """The recipe with these settings."""
        for key, value in self.settings.items():
            group, _, name = key.partition(".")
            changed = dataclasses.replace(getattr(recipe, group), **{name: value})
            recipe = dataclasses.replace(recipe, **{group: changed})
        return recipe


def ways_out_of(recipe: Recipe) -> Iterator[WayOut]:
    """Changes that need less device memory, from no cost in time or fidelity to the most.

    Args:
        recipe: changes it has made already are not suggested again.

    Yields:
        The changes; each can be combined with those before it.
    """
    training = recipe.training
    if recipe.loss.chunk_tokens is None:
        yield WayOut(settings={"loss.chunk_tokens": 1024}, why="keeps no logits")
    if training.per_device_train_batch_size > 1:
        accumulated = training.per_device_train_batch_size * training.gradient_accumulation_steps
        yield WayOut(
            settings={
                "training.per_device_train_batch_size": 1,
                "training.gradient_accumulation_steps": accumulated,
            },
            why="the same mathematics in smaller pieces",
        )
    if training.mixed_precision == "no" and recipe.model.dtype == "float32":
        yield WayOut(settings={"training.mixed_precision": "bf16"}, why="about half of the activations")
    if recipe.checkpointing.mode == "none":
        yield WayOut(
            settings={"checkpointing.mode": "full"},
            why="the activations inside the layers, for a second forward pass",
        )
    elif recipe.checkpointing.every_n_layers != 1 or recipe.checkpointing.skip_last_layers != 0:
        yield WayOut(
            settings={"checkpointing.every_n_layers": 1, "checkpointing.skip_last_layers": 0},
            why="every layer is recomputed",
        )
    if recipe.optimizer.name == "adamw":
        yield WayOut(
            settings={"optimizer.name": "adamw_bnb_8bit"}, why="6 of AdamW's 8 state bytes a parameter"
        )
    if not recipe.optimizer.name.startswith("paged"):
        yield WayOut(
            settings={"optimizer.name": "paged_adamw_8bit"},
            why="state moves to the host when the device is full",
        )
    length = recipe.data.max_length
    if length is None or length > SHORTEST_LENGTH:
        shorter = SHORTEST_LENGTH if length is None else max(SHORTEST_LENGTH, length // 2)
        yield WayOut(
            settings={"data.max_length": shorter},
            why="activations grow with the length of rows; cuts examples",
        )
    if recipe.model.dtype == "float32" and training.mixed_precision != "fp16":
        yield WayOut(
            settings={"model.dtype": "bfloat16"},
            why="2 bytes a weight and 2 a gradient; small updates round away, and the run counts them",
        )
