"""The parts of a HuggingFace causal LM on which techniques work: its stacks of layers, embedding, head and MLPs."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lowmem_ft.foundation.errors import ModelError

MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp")
"""Attributes by which decoder layers hold the parts that treat each token by itself."""

_WORDS = {"vision": ("vision", "visual", "image"), "audio": ("audio", "speech")}
"""Words in the names of parts that read images or audio."""


class ModelParts:
    """The parts of a model. Its stacks of layers are looked for once, when they are first asked for.

    Every ``enable_*`` takes a model or its parts; a build makes them once and passes them to all.

    Args:
        model: a causal LM from transformers, wrapped or not, with its adapters.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @classmethod
    def of(cls, model: nn.Module | ModelParts) -> ModelParts:
        """Return a model's parts; parts are returned as they are."""
        return model if isinstance(model, ModelParts) else cls(model)

    @property
    def base(self) -> Any:
        """The causal LM itself, inside PEFT's wrapper if it has one."""
        return base_model(self.model)

    @property
    def embedding(self) -> Any:
        """The embedding of tokens."""
        return self.base.get_input_embeddings()

    @property
    def head(self) -> Any:
        """The last linear layer; None if the model has none."""
        return self.base.get_output_embeddings()

    @functools.cached_property
    def stacks(self) -> dict[str, nn.ModuleList]:
        """All lists of layers, by their names in the model, without those inside a layer of another list."""
        return _stacks_in(self.model)

    @property
    def stacks_by_kind(self) -> dict[str, nn.ModuleList]:
        """The stacks of ``language``, ``vision`` and ``audio``; a kind with several stacks is left out."""
        by_kind: dict[str, list[nn.ModuleList]] = defaultdict(list)
        for name, stack in self.stacks.items():
            kinds = (kind for kind, words in _WORDS.items() if any(word in name for word in words))
            by_kind[next(kinds, "language")].append(stack)
        return {kind: found[0] for kind, found in by_kind.items() if len(found) == 1}

    def text_layers(self, way_out: str = "checkpointing.mode=none") -> nn.ModuleList:
        """Return the decoder layers of text: the only list, or the only one next to towers for images and sound.

        Args:
            way_out: the setting that does not need them, for the error message.

        Returns:
            The model's own ``nn.ModuleList``, as :meth:`layers` returns it.

        Raises:
            ModelError: if the model has no such list, or several.
        """
        found = self.stacks_by_kind.get("language")
        return self.layers(way_out) if found is None else found

    @property
    def towers(self) -> list[nn.ModuleList]:
        """The stacks other than that of :meth:`text_layers`."""
        text = self.text_layers()
        return [stack for stack in self.stacks.values() if stack is not text]

    def layers(self, way_out: str = "checkpointing.mode=none") -> nn.ModuleList:
        """Return the model's only list of decoder layers, first layer first.

        Args:
            way_out: the setting that does not need them, for the error message.

        Returns:
            The model's own ``nn.ModuleList``, whose items are ``GradientCheckpointingLayer`` modules.

        Raises:
            ModelError: if the model has no such list, or more than one (encoder and decoder, image and text).
        """
        stacks, name = self.stacks, type(self.model).__name__
        if not stacks:
            raise ModelError(
                "Layer-wise techniques need a model whose decoder layers are transformers GradientCheckpointingLayer "
                f"modules in one ModuleList; {name} does not have them. Use an architecture that does, or set "
                f"{way_out}."
            )
        if len(stacks) > 1:
            raise ModelError(
                f"Layer-wise techniques need a model with one stack of decoder layers; {name} has {len(stacks)}: "
                f"{', '.join(stacks)}. Use a decoder-only text model, or set {way_out}."
            )
        return next(iter(stacks.values()))


def base_model(model: Any) -> Any:
    """Return the causal LM itself, with its adapters; a model without PEFT's wrapper is returned as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return a model's only list of decoder layers, see :meth:`ModelParts.layers`."""
    return ModelParts(model).layers()


def mlps_in(layer: nn.Module) -> list[nn.Module]:
    """Return the parts of a decoder layer that treat each token by itself, and the modules inside them."""
    return [module for mlp in mlps_of(layer) for module in mlp.modules()]


def mlps_of(layer: nn.Module) -> list[nn.Module]:
    """Return the parts of a decoder layer that treat each token by itself, known by their names."""
    children = dict(layer.named_children())
    return [children[name] for name in MLP_NAMES if name in children]


def tensor_of_experts(layer: nn.Module) -> str:
    """Return the name of a parameter that holds the weights of several experts; empty if the layer has none."""
    parameters = layer.named_parameters()
    return next((name for name, one in parameters if one.dim() > 2 and "expert" in name), "")


def _stacks_in(model: nn.Module) -> dict[str, nn.ModuleList]:
    stacks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and _holds_layers(module)
    }
    return {
        name: stack
        for name, stack in stacks.items()
        if not any(name.startswith(f"{other}.") for other in stacks)
    }


def _holds_layers(modules: nn.ModuleList) -> bool:
    return len(modules) > 0 and all(isinstance(layer, GradientCheckpointingLayer) for layer in modules)
