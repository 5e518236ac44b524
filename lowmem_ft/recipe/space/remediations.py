"""Remediations for a recipe that needs too much device memory: changes of its settings, the cheapest first."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lowmem_ft.foundation.knob import COSTS, FIDELITIES
from lowmem_ft.optimizers.table import OPTIMIZERS, Capability, OptimizerRow
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import recipe_keys
from lowmem_ft.recipe.rules.engine_rules import engine_of, problems_with_engine
from lowmem_ft.recipe.space.search_space import with_settings

CHUNK_TOKENS = 1024

SHORTEST_LENGTH = 512
"""Smallest ``data.max_length``, in tokens, that a remediation suggests."""

LONG_ROWS = 2048
"""Tokens per row from which tiling an MLP is worthwhile."""

Half = Literal["bf16", "fp16"]
"""The 16-bit type that a run can compute in."""

_DTYPES: dict[Half, str] = {"bf16": "bfloat16", "fp16": "float16"}

_FOR_STREAMING: tuple[Capability, ...] = (
    "updates_by_slices",
    "steps_in_backward",
    "moves_state_by_chunks",
)

Settings = dict[str, Any]
"""New values by dotted key."""


@dataclass(frozen=True, kw_only=True)
class Remediation:
    """A change of settings that needs less memory, and its effect.

    Args:
        settings: new values by dotted key.
        why: the memory that it frees, or its cost, in a clause.
    """

    settings: Mapping[str, Any]
    why: str

    @property
    def overrides(self) -> tuple[str, ...]:
        """The settings as a user types them."""
        return tuple(recipe_keys()[key].setting(value) for key, value in self.settings.items())

    @property
    def overrides_text(self) -> str:
        """The settings as a user types them, on one line."""
        return shlex.join(self.overrides)

    def applied_to(self, recipe: Recipe) -> Recipe:
        """Return the recipe with these settings."""
        return with_settings(recipe, self.settings)

    def is_exact_for(self, recipe: Recipe) -> bool:
        """Return whether a recipe trains the same numbers with this change, up to the order of sums."""
        effects = (
            recipe_keys()[path].effect_of_change(recipe, value) for path, value in self.settings.items()
        )
        return all(effect.fidelity == "exact" for effect in effects)

    def keeps_mathematics_of(self, recipe: Recipe) -> bool:
        """Return whether a recipe trains the same model by the same update with this change, up to rounding."""
        return self.price(recipe)[0] < len(COSTS)

    def price(self, recipe: Recipe) -> tuple[int, int]:
        """Return a sort key of the change's price: its cost, then its fidelity; other mathematics is most expensive."""
        effects = [
            recipe_keys()[path].effect_of_change(recipe, value) for path, value in self.settings.items()
        ]
        fidelity = max(FIDELITIES.index(effect.fidelity) for effect in effects)
        if FIDELITIES[fidelity] == "other mathematics":
            return len(COSTS), 0
        return max(COSTS.index(effect.cost) for effect in effects), fidelity


def remediations_for(
    recipe: Recipe, *, num_processes: int = 1, has_bfloat16: bool = True
) -> Iterator[Remediation]:
    """Yield changes that need less device memory, from no cost in time or fidelity to the most, as the knobs state it.

    Each includes the settings that it requires (``optimizer.in_backward`` may require checkpointing of every layer), so
    that it works alone as well as after any of those before it; of two values for one key the later counts.

    Args:
        recipe: the recipe; changes that it has already made are not suggested again.
        num_processes: processes that train together; some changes work only in one process.
        has_bfloat16: whether the device computes with bfloat16; without it, float16 and a loss scale take its place.

    Yields:
        The changes.
    """
    engine = engine_of(recipe, num_processes)

    def problems_with(changed: Recipe) -> set[str]:
        return set() if engine is None else set(problems_with_engine(changed, engine))

    known = problems_with(recipe)
    half: Half = "bf16" if has_bfloat16 and recipe.training.mixed_precision != "fp16" else "fp16"
    for way in sorted(_remediations_for(recipe, half), key=lambda way: way.price(recipe)):
        if known.issuperset(problems_with(way.applied_to(recipe))):
            yield way


def _remediations_for(recipe: Recipe, half: Half) -> Iterator[Remediation]:
    yield from _at_no_cost(recipe, half)
    yield from _for_time(recipe)
    if recipe.adapter.name == "none":
        yield from _of_the_optimizer(recipe, half)
    yield from _over_the_host_link(recipe, half)
    yield from _with_other_mathematics(recipe, half)


def _at_no_cost(recipe: Recipe, half: Half) -> Iterator[Remediation]:
    """Yield changes with the same mathematics and speed, some in other types; masters keep the bits that they drop."""
    training = recipe.training
    if recipe.loss.chunk_tokens is None:
        yield Remediation(settings={"loss.chunk_tokens": CHUNK_TOKENS}, why="keeps no logits")
    if training.per_device_train_batch_size > 1:
        yield Remediation(
            settings={
                "training.per_device_train_batch_size": 1,
                "training.gradient_accumulation_steps": _rows_per_step(recipe),
                **(_finished_gradients(recipe) if recipe.optimizer.in_backward else {}),
            },
            why="the same mathematics in smaller pieces",
        )
    if training.mixed_precision == "no" and recipe.model.dtype == "float32" and _may_autocast(recipe, half):
        yield Remediation(settings={"training.mixed_precision": half}, why="about half of the activations")
    if recipe.adapter.name != "none" and recipe.model.dtype != _DTYPES[half]:
        yield Remediation(settings=_frozen_in(half), why="2 of 4 bytes a frozen weight")
    if half == "bf16" and recipe.adapter.name == "none" and _can_spare_master_bytes(recipe, to=2):
        yield Remediation(
            settings=_bfloat16_with_master(recipe, "split16"),
            why="float32 weights in two halves: gradients and products use one, master keeps the other",
        )


def _for_time(recipe: Recipe) -> Iterator[Remediation]:
    """Yield changes with the same numbers, some of which are recomputed or computed in smaller pieces."""
    config = recipe.checkpointing
    if config.mode == "none":
        yield Remediation(
            settings=_every_layer(recipe),
            why="the activations inside the layers, for a second forward pass",
        )
    elif _every_layer(recipe):
        yield Remediation(settings=_every_layer(recipe), why="every layer is recomputed")
    if config.mode == "selective":
        yield Remediation(
            settings={"checkpointing.mode": "full"}, why="the attention's outputs, which are computed again"
        )
    length = recipe.data.max_length
    may_be_tiled = recipe.model.quantization != "int8" and (length is None or length >= LONG_ROWS)
    if recipe.tiling.mlp == 1 and may_be_tiled:
        yield Remediation(
            settings={"tiling.mlp": 4}, why="3 of 4 of the activations inside the MLP of a layer"
        )
    if recipe.tiling.head == 1:
        yield Remediation(
            settings={"loss.chunk_tokens": recipe.loss.chunk_tokens or CHUNK_TOKENS, "tiling.head": 8},
            why="what the head holds for its logits, which are computed twice",
        )


def _of_the_optimizer(recipe: Recipe, half: Half) -> Iterator[Remediation]:
    """Yield changes to gradients, optimizer state, and the lower bits of the weights themselves."""
    optimizer = recipe.optimizer
    may_step = _can(recipe, "steps_in_backward") and _may_step_in_backward(recipe, half)
    if not optimizer.in_backward and may_step:
        yield Remediation(
            settings=_in_backward(recipe),
            why=(
                "gradients are applied as backward finishes them; with max_grad_norm they are kept in the weights' "
                "type"
            ),
        )
    smallest_bytes = _stand_in(recipe).state_bytes("8bit")
    if _can(recipe, "takes_state_formats") and smallest_bytes < optimizer.state_bytes:
        yield Remediation(
            settings={**_with(recipe, "takes_state_formats"), "optimizer.state": "8bit"},
            why="6 of AdamW's 8 state bytes a parameter; averages are rounded, without bias",
        )
    if half == "bf16" and _can_spare_master_bytes(recipe, to=1):
        yield Remediation(
            settings=_bfloat16_with_master(recipe, "split24"),
            why="1 of the 2 additional bytes of a bfloat16 weight; 24 of 32 bits remain, without bias",
        )


def _over_the_host_link(recipe: Recipe, half: Half) -> Iterator[Remediation]:
    """Yield changes that offload tensors to host memory."""
    offload, trained = recipe.offload, recipe.adapter.name == "none"
    if offload.activations == "none":
        yield Remediation(
            settings={**_every_layer(recipe), "offload.activations": "inputs"},
            why="the inputs of checkpointed layers are kept on the host",
        )
    if trained and offload.optimizer == "device" and _can(recipe, "moves_state_by_chunks"):
        yield Remediation(
            settings={**_with(recipe, "moves_state_by_chunks"), "offload.optimizer": "host"},
            why="state and master are kept on the host, and cross PCIe twice a step",
        )
    may_stream = _can(recipe, *_FOR_STREAMING) and _may_step_in_backward(recipe, half)
    if offload.parameters == "device" and (not trained or may_stream):
        unscaled = trained and half == "fp16"
        yield Remediation(
            settings={**(_streamed(recipe, half) if trained else {}), "offload.parameters": "stream"},
            why="all weights except for two layers, which are copied to the device in turn"
            + ("; in float32, because the loss scale comes too late for them" if unscaled else ""),
        )
    elif offload.resident_layers > 0:
        yield Remediation(
            settings={"offload.resident_layers": 0}, why="every layer's weights are copied to the device"
        )


def _with_other_mathematics(recipe: Recipe, half: Half) -> Iterator[Remediation]:
    """Yield changes to another model, or to other data."""
    frozen: Settings = {}
    if recipe.adapter.name == "none":
        frozen = {
            "adapter.name": "lora",
            "optimizer.master": "fp32",
            **_frozen_in(half),
            "training.mixed_precision": half,
        }
        yield Remediation(
            settings=frozen,
            why="gradients and state of everything except low-rank adapters; needs a higher learning rate",
        )
    if recipe.model.quantization == "none" and not recipe.model.is_gguf:
        yield Remediation(
            settings={**frozen, "model.quantization": "nf4"},
            why="1.5 of 2 bytes a frozen weight, which is rounded, and unpacked for each use",
        )
    length = recipe.data.max_length
    if length is None or length > SHORTEST_LENGTH:
        shorter = SHORTEST_LENGTH if length is None else max(SHORTEST_LENGTH, length // 2)
        yield Remediation(
            settings={"data.max_length": shorter},
            why="activations grow with the length of rows; truncates examples",
        )


def _rows_per_step(recipe: Recipe) -> int:
    return recipe.training.per_device_train_batch_size * recipe.training.gradient_accumulation_steps


def _every_layer(recipe: Recipe) -> Settings:
    """Return the settings that checkpoint every layer; empty if every layer is checkpointed already."""
    config = recipe.checkpointing
    if config.mode == "none":
        return {"checkpointing.mode": "full"}
    if (config.every_n_layers, config.skip_last_layers) == (1, 0):
        return {}
    return {"checkpointing.every_n_layers": 1, "checkpointing.skip_last_layers": 0}


def _stand_in(recipe: Recipe) -> OptimizerRow:
    """Return the row of the optimizer that replaces the recipe's own where that lacks a capability."""
    return OPTIMIZERS[recipe.optimizer.row.stand_in or recipe.optimizer.name]


def _has(row: OptimizerRow, capabilities: tuple[Capability, ...]) -> bool:
    return all(getattr(row, capability) for capability in capabilities)


def _can(recipe: Recipe, *capabilities: Capability) -> bool:
    """Return whether the recipe's optimizer, or its stand-in, has all capabilities."""
    return _has(recipe.optimizer.row, capabilities) or _has(_stand_in(recipe), capabilities)


def _with(recipe: Recipe, *capabilities: Capability) -> Settings:
    """Return the settings that add the capabilities: the stand-in optimizer, with state of about the same size."""
    optimizer = recipe.optimizer
    if _has(optimizer.row, capabilities):
        return {}
    settings: Settings = {"optimizer.name": optimizer.row.stand_in}
    if optimizer.row.state_bytes() < _stand_in(recipe).state_bytes():
        settings["optimizer.state"] = "8bit"
    if recipe.model.dtype == "bfloat16" and recipe.adapter.name == "none":
        settings["optimizer.master"] = "split16"
    return settings


def _master_bytes(recipe: Recipe) -> int:
    """Return the master's bytes per 16-bit trained weight; float32 weights count as bfloat16 with a full copy."""
    if recipe.model.dtype != "bfloat16":
        return 4 if recipe.optimizer.master == "fp32" else 2
    if not recipe.optimizer.row.takes_formats:
        return 0
    return {"fp32": 4, "split16": 2, "split24": 1}.get(recipe.optimizer.master, 0)


def _can_spare_master_bytes(recipe: Recipe, *, to: int) -> bool:
    return _can(recipe, "takes_formats") and _master_bytes(recipe) > to


def _bfloat16_with_master(recipe: Recipe, master: str) -> Settings:
    """Return the settings of bfloat16 weights with a master, without autocast: products are already in bfloat16."""
    settings = {**_with(recipe, "takes_formats"), "optimizer.master": master}
    if recipe.model.dtype != "bfloat16":
        settings |= {"model.dtype": "bfloat16", "training.mixed_precision": "no"}
    return settings


def _frozen_in(half: Half) -> Settings:
    """Return the settings of frozen 16-bit weights; gradients through float16 weights need a loss scale."""
    return {"model.dtype": _DTYPES[half], **({"training.mixed_precision": half} if half == "fp16" else {})}


def _may_autocast(recipe: Recipe, half: Half) -> bool:
    """Return whether autocast is possible: a loss scale must reach the head, and is checked at the end of backward."""
    if half == "bf16" or recipe.adapter.name != "none":
        return True
    may_step = not recipe.optimizer.in_backward or _may_step_in_backward(recipe, half)
    return recipe.offload.parameters == "device" and may_step


def _may_step_in_backward(recipe: Recipe, half: Half) -> bool:
    """Return whether steps in backward are possible: a loss scale is checked first, while weights wait for the norm."""
    return half == "bf16" or recipe.training.max_grad_norm is not None


def _finished_gradients(recipe: Recipe) -> Settings:
    """Return the settings for one gradient per weight and step: vertical order sums those of several micro-batches."""
    if _rows_per_step(recipe) == 1 or recipe.accumulation.order == "vertical":
        return {}
    return {**_every_layer(recipe), "accumulation.order": "vertical"}


def _in_backward(recipe: Recipe) -> Settings:
    if recipe.optimizer.in_backward:
        return {}
    return {
        **_with(recipe, "steps_in_backward"),
        **_finished_gradients(recipe),
        "optimizer.in_backward": True,
    }


def _streamed(recipe: Recipe, half: Half) -> Settings:
    """Return the settings that streaming of trained weights requires."""
    on_host = {} if recipe.offload.optimizer == "host" else {"offload.optimizer": "host"}
    unscaled = {"training.mixed_precision": "no"} if half == "fp16" else {}
    return {
        **_with(recipe, *_FOR_STREAMING),
        **_every_layer(recipe),
        **_in_backward(recipe),
        **on_host,
        **unscaled,
    }
