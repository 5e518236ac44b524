"""How the layers of a model repeat, and the same model with fewer of them."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from lowmem_ft.errors import ModelError
from lowmem_ft.recipe import Recipe
from lowmem_ft.recipe.keys import recipe_keys
from lowmem_ft.techniques.modules.decoder_layers import decoder_layers
from lowmem_ft.virtual_gpu.replay.sweeps import Layers

LONGEST_PERIOD = 8
"""Layers: 6 in Gemma 3 (five with a sliding window, one without), 4 in Llama 4."""

LAST_LAYERS = 2
"""What a layer hands on lives until the layer after next, so that so many layers at the end are unlike the rest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShallowModel:
    """A shallow stand-in for a deep model.

    Args:
        layers: how the layers repeat.
        num_layers: of the stand-in; one period more makes the proof.
        full_num_layers: of the model itself.
    """

    layers: Layers
    num_layers: int
    full_num_layers: int

    def deeper(self) -> ShallowModel:
        """With a period more before the one that is repeated: the stand-in that makes the proof of this one.

        Where attention and MLP work side by side (Phi, Falcon), a gradient is handed down past the next layer, so that
        the first two layers are unlike the rest.
        """
        period = self.layers.period
        layers = dataclasses.replace(self.layers, lead=self.layers.lead + period)
        return dataclasses.replace(self, layers=layers, num_layers=self.num_layers + period)


def shallow_model(recipe: Recipe, model: nn.Module) -> ShallowModel | None:
    """The smallest stand-in whose trace can be extended to the model's; None if that would not be less work.

    What a recipe says in numbers of layers (knobs with ``counts_layers``, such as
    ``checkpointing.skip_last_layers``) must not reach beyond the stand-in: it counts as a margin and as a period.

    Args:
        recipe: for what it says about layers.
        model: the whole model, on the meta device.

    Returns:
        The stand-in.
    """
    try:
        stack = decoder_layers(model)
    except ModelError:
        return None
    name = next(name for name, module in model.named_modules() if module is stack)
    counts = _layer_counts(recipe)
    lead, period = _repetition([_signature(layer) for layer in stack])
    period = math.lcm(period, *counts)
    shallow = lead + 2 * period + max(period, LAST_LAYERS) + sum(counts)
    shallow += (len(stack) - shallow) % period
    if 2 * shallow + period >= len(stack):
        return None
    model_of_few = ShallowModel(
        layers=Layers(stack=name, lead=lead, period=period), num_layers=shallow, full_num_layers=len(stack)
    )
    return model_of_few.deeper() if _sends_for_the_next_layer(recipe) else model_of_few


def with_num_layers(hf_config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    """The config of the model's first layers; lists with an item for each layer are cut."""
    config = copy.deepcopy(hf_config)
    text_config: Any = config.get_text_config()
    full = text_config.num_hidden_layers
    for name, value in list(vars(text_config).items()):
        if isinstance(value, (list, tuple)) and len(value) == full:
            setattr(text_config, name, value[:num_layers])
    text_config.num_hidden_layers = num_layers
    return config


def _repetition(signatures: list[Any]) -> tuple[int, int]:
    """How many layers come before the repetition begins, and its period; the fewest in sum."""
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
    """What a layer is: modules with their settings, tensors with their shapes and types."""
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


def _sends_for_the_next_layer(recipe: Recipe) -> bool:
    """Whether what a layer needs comes from the host in the turn of the layer before: the first then differs."""
    return recipe.offload.activations != "none" or recipe.offload.parameters == "stream"


def _layer_counts(recipe: Recipe) -> list[int]:
    """What the recipe says in numbers of layers, where that is not what every recipe says."""
    counts = [(key.value_in(recipe), key.default) for key in recipe_keys().values() if key.counts_layers]
    return [count for count, default in counts if count > 0 and count != default]
