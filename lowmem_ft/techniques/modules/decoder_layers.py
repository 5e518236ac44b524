"""The stack of decoder layers in a HuggingFace causal LM, on which layer-wise techniques work."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lowmem_ft.foundation.errors import ModelError

MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp")
"""Attributes by which decoder layers hold the parts that treat each token by itself."""


def decoder_layers(model: nn.Module, way_out: str = "checkpointing.mode=none") -> nn.ModuleList:
    """Return a model's only list of decoder layers, first layer first; wrappers such as PEFT's are unwrapped.

    Args:
        model: a causal LM from transformers, wrapped or not.
        way_out: the setting that does not need them, for the error message.

    Returns:
        The model's own ``nn.ModuleList``, whose items are ``GradientCheckpointingLayer`` modules.

    Raises:
        ModelError: if the model has no such list, or more than one (encoder and decoder, image and text).
    """
    stacks = _outermost(
        {name: module for name, module in model.named_modules() if _is_layer_stack(module)},
    )
    if not stacks:
        raise ModelError(
            "Layer-wise techniques need a model whose decoder layers are transformers GradientCheckpointingLayer "
            f"modules in one ModuleList; {type(model).__name__} does not have them. Use an architecture that does, or "
            f"set {way_out}."
        )
    if len(stacks) > 1:
        raise ModelError(
            f"Layer-wise techniques need a model with one stack of decoder layers; {type(model).__name__} has "
            f"{len(stacks)}: {', '.join(stacks)}. Use a decoder-only text model, or set {way_out}."
        )
    return next(iter(stacks.values()))


def mlps_in(layer: nn.Module) -> list[nn.Module]:
    """Return the parts of a decoder layer that treat each token by itself, and the modules inside them."""
    return [module for mlp in mlps_of(layer) for module in mlp.modules()]


def mlps_of(layer: nn.Module) -> list[nn.Module]:
    """Return the parts of a decoder layer that treat each token by itself, known by their names."""
    children = dict(layer.named_children())
    return [children[name] for name in MLP_NAMES if name in children]


def _is_layer_stack(module: nn.Module) -> bool:
    return (
        isinstance(module, nn.ModuleList)
        and len(module) > 0
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    )


def _outermost(stacks: dict[str, nn.Module]) -> dict[str, nn.ModuleList]:
    """Drop the lists that are inside a layer of another list."""
    return {
        name: stack
        for name, stack in stacks.items()
        if isinstance(stack, nn.ModuleList) and not any(name.startswith(f"{other}.") for other in stacks)
    }


def tensor_of_experts(layer: nn.Module) -> str:
    """Return the name of a parameter that holds the weights of several experts; empty if the layer has none."""
    parameters = layer.named_parameters()
    return next((name for name, one in parameters if one.dim() > 2 and "expert" in name), "")
