"""What to change in a recipe that ran out of device memory: the cheapest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from lowmem_ft.errors import DoesNotFitError
from lowmem_ft.memory.meter import MemoryReading
from lowmem_ft.recipe import Recipe
from lowmem_ft.units import format_bytes


def does_not_fit(recipe: Recipe, memory: MemoryReading, when: str) -> DoesNotFitError:
    """The error for a run whose device memory ran out.

    Args:
        recipe: what was run; changes it has made already are not suggested again.
        memory: of the device, at the end.
        when: the moment, such as ``at step 1``.

    Returns:
        An error that says how far it came and what would need less, from no cost in time to the most.
    """
    budget = f" (budget.device={recipe.budget.device})" if recipe.budget.device else ""
    ways_out = list(_ways_out(recipe)) or ["a GPU with more memory"]
    return DoesNotFitError(
        f"The device memory ran out {when}{budget}, after a peak of {format_bytes(memory.peak_bytes)} in tensors. "
        f"What would need less, cheapest first: {'; '.join(ways_out)}."
    )


def _ways_out(recipe: Recipe) -> Iterator[str]:
    training = recipe.training
    if recipe.loss.chunk_tokens is None:
        yield "loss.chunk_tokens=1024 (keeps no logits)"
    if training.per_device_train_batch_size > 1:
        accumulated = training.per_device_train_batch_size * training.gradient_accumulation_steps
        yield (
            f"training.per_device_train_batch_size=1 training.gradient_accumulation_steps={accumulated} "
            "(the same mathematics in smaller pieces)"
        )
    if training.mixed_precision == "no" and recipe.model.dtype == "float32":
        yield "training.mixed_precision=bf16 (about half of the activations)"
    if recipe.checkpointing.mode == "none":
        yield "checkpointing.mode=full (the activations inside the layers, for a second forward pass)"
    elif recipe.checkpointing != dataclasses.replace(
        recipe.checkpointing, every_n_layers=1, skip_last_layers=0
    ):
        yield "checkpointing.every_n_layers=1 checkpointing.skip_last_layers=0 (every layer)"
    if recipe.optimizer.name == "adamw":
        yield "optimizer.name=adamw_bnb_8bit (6 of AdamW's 8 state bytes a parameter)"
    if not recipe.optimizer.name.startswith("paged"):
        yield "optimizer.name=paged_adamw_8bit (state moves to the host when the device is full)"
    if recipe.data.max_length is None or recipe.data.max_length > 512:
        yield "a smaller data.max_length (activations grow with it)"
