"""Activation checkpointing: a decoder layer keeps only its input, and runs forward again in backward."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from lowmem_ft.foundation.errors import raise_problems
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.checkpointing.recomputed_layer import RecomputedLayer
from lowmem_ft.techniques.checkpointing.selective_checkpointing import (
    KeepAttentionOutputs,
    refuse_unfused_attention,
)
from lowmem_ft.techniques.modules.model_parts import ModelParts
from lowmem_ft.techniques.modules.patching import set_attribute
from lowmem_ft.techniques.technique import Technique

log = logging.getLogger(__name__)


def enable_checkpointing(model: nn.Module | ModelParts, config: CheckpointingConfig) -> Technique:
    """Make the chosen decoder layers recompute their activations in backward, without reentrant autograd.

    Frees: all that a layer would keep for backward, except its input (batch x tokens x hidden); with
    ``mode="selective"`` except attention's output too (as large, and 4 bytes a token and head).
    Costs: one more forward of each chosen layer, and the host's time for hooks on what the layer would save: that of
    some 70 operators for a Llama's. Selective spares attention, and routes every operator of the layer through Python:
    that of some 420, so that it is the slower one where the host sets the pace.
    Equals: the same losses and gradients bit for bit, dropout included (the RNG state is restored where it may matter).
    Limits: selective needs fused attention; where it draws dropout, it is recomputed after all, with a warning. Only in
    train mode; a model without one stack of decoder layers raises a ModelError, a number out of range or
    ``mode="auto"`` a UserError. Layers of towers for images and sound recompute all, as by transformers' own
    switch; a frozen one keeps nothing anyway. Call the model with ``use_cache=False`` (Trainer and our step do): a
    recomputation would fill a key-value cache a second time, so transformers drops it from these layers, with a
    warning. The config's own ``use_cache`` is left alone, because checkpoints saved meanwhile contain it.
    Source: Training Deep Nets with Sublinear Memory Cost, 2016 (arXiv:1604.06174); Reducing Activation Recomputation
    in Large Transformer Models, 2022 (arXiv:2205.05198), for what to keep.

    Args:
        model: a causal LM from transformers, wrapped or not, or its parts.
        config: which layers to checkpoint.

    Returns:
        A handle whose ``remove()`` restores each layer's own setting.
    """
    if config.mode == "none":
        return Technique()
    config.refuse_unchosen()
    parts = ModelParts.of(model)
    layers = parts.text_layers()
    chosen = _chosen_layers(config, len(layers))
    keep_outputs = None
    if config.mode == "selective":
        refuse_unfused_attention(getattr(getattr(parts.model, "config", None), "_attn_implementation", None))
        keep_outputs = KeepAttentionOutputs()
    undo: list[Callable[[], None]] = []
    for index, layer in enumerate(layers):
        undo.append(set_attribute(layer, "gradient_checkpointing", index in chosen))
        undo.append(
            set_attribute(layer, "_gradient_checkpointing_func", keep_outputs or RecomputedLayer(layer))
        )
    for layer in (layer for tower in parts.towers for layer in tower):
        undo.append(set_attribute(layer, "gradient_checkpointing", True))
        undo.append(set_attribute(layer, "_gradient_checkpointing_func", RecomputedLayer(layer)))
    log.info("Checkpointing: %s.", _describe(config, chosen, len(layers)))
    return Technique(*undo)


def _chosen_layers(config: CheckpointingConfig, num_layers: int) -> range:
    raise_problems((*config.problems(), *config.problems_with(num_layers)))
    return config.layers_of(num_layers)


def _describe(config: CheckpointingConfig, chosen: range, num_layers: int) -> str:
    what = "their activations" if config.mode == "full" else "everything except attention"
    text = f"{len(chosen)} of {num_layers} layers recompute {what} in backward"
    if config.every_n_layers > 1:
        text += f", every {config.every_n_layers} from layer 0"
    if config.skip_last_layers:
        text += f", the last {config.skip_last_layers} excluded because they are freed first"
    return text
