"""The repetition of a model's layers, and the same model with fewer of them."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lowmem_ft.foundation.errors import ModelError
from lowmem_ft.foundation.knob import CountedLayers
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.reading.keys import key_with, recipe_keys
from lowmem_ft.recipe.space.search_space import with_settings
from lowmem_ft.techniques.modules.model_parts import decoder_layers
from lowmem_ft.virtual_gpu.replay.depth.layer_passes import Layers

LONGEST_PERIOD = 8
"""The longest period to look for, in layers: 6 in Gemma 3 (five with a sliding window, one without), 4 in Llama 4."""

EDGE_LAYERS = 2
"""Layers at an end that differ from the rest, as the output of a layer lives until the layer after next."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShallowModel:
    """A shallow stand-in for a deep model.

    Args:
        layers: how the layers repeat.
        num_layers: layers of the stand-in.
        more: periods that each repeated stretch of the model has beyond the stand-in.
        last: numbers of last layers that the recipe treats differently, by key, where they are others than the model's.
    """

    layers: Layers
    num_layers: int
    more: tuple[int, ...]
    last: tuple[tuple[str, int], ...] = ()

    def deeper(self) -> ShallowModel:
        """Return a stand-in with one more period before the repeated one, to try where this one fails.

        Where attention and MLP work in parallel (Phi, Falcon), a gradient is passed down beyond the next layer, so that
        the first two layers differ from the rest.
        """
        period = self.layers.period
        layers = dataclasses.replace(
            self.layers,
            lead=self.layers.lead + period,
            tails=tuple(tail + period for tail in self.layers.tails),
        )
        longer_first = self._with_periods((1, *(0 for _ in self.layers.tails)))
        return dataclasses.replace(longer_first, layers=layers)

    def longer(self) -> ShallowModel:
        """Return a stand-in with one more period in each stretch, which proves the repetition."""
        return self._with_periods((1,) * len(self.more))

    def recipe(self, recipe: Recipe) -> Recipe:
        """Return the recipe for the stand-in."""
        return with_settings(recipe, dict(self.last))

    def _with_periods(self, added: tuple[int, ...]) -> ShallowModel:
        """Return a stand-in with more periods in each stretch."""
        period, pivots = self.layers.period, self.layers.pivots

        def grown(last: int) -> int:
            """Return how many are last: stretches among them get longer."""
            among = [
                extra for extra, pivot in zip(added, pivots, strict=True) if pivot >= self.num_layers - last
            ]
            return last + period * sum(among)

        return dataclasses.replace(
            self,
            num_layers=grown(self.num_layers),
            last=tuple((key, grown(last)) for key, last in self.last),
            more=tuple(extra - one for extra, one in zip(self.more, added, strict=True)),
        )


def stand_ins(recipe: Recipe, model: nn.Module) -> list[ShallowModel]:
    """Return the stand-ins for a model, in the order in which to try them; none if all of it is less work.

    Args:
        recipe: for its settings about layers.
        model: the whole model, on the meta device.
    """
    usual = _shallow_model(recipe, model)
    if usual is None:
        return []
    if usual.layers.tails:  # a deeper stand-in of several stretches costs more than all layers
        smaller = _shallow_model(recipe, model, edge=EDGE_LAYERS)
        return [smaller, usual] if smaller and smaller.num_layers < usual.num_layers else [usual]
    return [usual, usual.deeper()] if usual.more[0] > 1 else [usual]


def _shallow_model(recipe: Recipe, model: nn.Module, *, edge: int | None = None) -> ShallowModel | None:
    """Return the smallest stand-in whose trace can be extended to the model's; None if that would not be less work.

    Settings that a recipe gives in numbers of layers count as a margin and as a period. The last layers that it treats
    differently (``offload.resident_layers``, ``checkpointing.skip_last_layers``) repeat by themselves.

    Args:
        recipe: for its settings about layers.
        model: the whole model, on the meta device.
        edge: layers at either end of a stretch that may differ from the rest; None: a whole period, so that each kind
            of layer is among those that a pass meets first, which tune their kernels then. It is a whole period, too,
            where the recipe's settings reach from one layer to others.

    Returns:
        The stand-in.
    """
    try:
        stack = decoder_layers(model)
    except ModelError:
        return None
    name = next(name for name, module in model.named_modules() if module is stack)
    lead, period = _repetition([_signature(layer) for layer in stack])
    counts = [value for _, value in layer_counts(recipe, "period")]
    period = math.lcm(period, *counts)
    margin = 0
    if key_with(recipe, "layers fetched ahead"):
        margin += period
    if recipe.offload.folder is not None:  # files are copied in a later layer's turn
        margin += period
    lead += margin
    if edge is None or counts or margin or edge > period:
        edge = period
    enough = edge + period + max(edge, EDGE_LAYERS) + sum(counts)
    last = layer_counts(recipe, "last")
    starts = sorted({0, *(len(stack) - num for _, num in last if num < len(stack))})
    lengths = [stop - start for start, stop in itertools.pairwise([*starts, len(stack)])]
    short = [_shortened(length, enough, period) for length in lengths]
    short[0] = _shortened(lengths[0], lead + enough, period)
    short_starts = list(itertools.accumulate(short, initial=0))
    repeated = [index for index, length in enumerate(lengths) if short[index] < length]
    more = [(lengths[index] - short[index]) // period for index in repeated]
    if not more or 2 * sum(short) + len(more) * period >= len(stack):
        return None
    first, *others = repeated
    of_stand_in = {
        key: sum(short) - short_starts[starts.index(max(0, len(stack) - num))] for key, num in last
    }
    return ShallowModel(
        layers=Layers(
            stack=name,
            lead=short_starts[first] if first else lead,
            period=period,
            tails=tuple(short_starts[index] for index in others),
            edge=None if edge == period else edge,
        ),
        num_layers=sum(short),
        more=tuple(more),
        last=tuple((key, of_stand_in[key]) for key, num in last if of_stand_in[key] < num),
    )


def _shortened(num_layers: int, enough: int, period: int) -> int:
    """Return the fewest layers, at least ``enough``, that whole periods extend to all; all of them if they are few."""
    return num_layers if num_layers <= enough else enough + (num_layers - enough) % period


def with_num_layers(hf_config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """Return the config of the model's first layers; lists with an item for each layer are shortened."""
    config = copy.deepcopy(hf_config)
    text_config: Any = config.get_text_config()
    full = text_config.num_hidden_layers
    for name, value in list(vars(text_config).items()):
        if isinstance(value, (list, tuple)) and len(value) == full:
            setattr(text_config, name, value[:num_layers])
    text_config.num_hidden_layers = num_layers
    return config


def _repetition(signatures: list[Any]) -> tuple[int, int]:
    """Return the number of layers before the repetition begins, and its period; the pair with the smallest sum."""
    num_layers = len(signatures)
    candidates = [
        (lead + period, period, lead)
        for period in range(1, min(LONGEST_PERIOD, num_layers) + 1)
        for lead in range(num_layers - period + 1)
        if all(signatures[i] == signatures[i + period] for i in range(lead, num_layers - period))
    ]
    _, period, lead = min(candidates)
    return lead, period


def _signature(layer: nn.Module) -> Any:
    """Return a layer's signature: modules with their settings, tensors with their shapes and types."""
    return [
        (
            name,
            type(module),
            sorted((key, value) for key, value in vars(module).items() if _is_setting(key, value)),
            [
                (key, p.shape, p.dtype, p.requires_grad)
                for key, p in module._parameters.items()
                if p is not None
            ],
            [(key, b.shape, b.dtype) for key, b in module._buffers.items() if b is not None],
        )
        for name, module in layer.named_modules()
    ]


def _is_setting(key: str, value: Any) -> bool:
    is_number = key in ("layer_idx", "layer_id", "layer_index", "layer_number")
    return not is_number and isinstance(value, (bool, int, float, str, torch.dtype))


def layer_counts(recipe: Recipe, which: CountedLayers) -> list[tuple[str, int]]:
    """Return the recipe's settings in numbers of layers, by key, where they are not at their defaults."""
    return [
        (path, key.value_in(recipe))
        for path, key in recipe_keys().items()
        if key.counts_layers == which and key.value_in(recipe) not in (0, key.default)
    ]
