"""Tensors that a node of autograd saves before it computes, so that recomputation can stop before it.

The recomputation of a checkpointed layer stops at the last tensor that is saved. A custom function's tensors are saved
after its forward; if the layer ends with one, and a node in front of it has saved them, its products are not computed
again. Such a node costs the host as much as several operators: only the last module of a layer should have one, and
only while hooks take what is saved, as checkpoints do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from lowmem_ft.foundation.upstream.patches import existing


class SavedTensors:
    """Tensors that :func:`save_early` has saved, for the backward pass of the node that follows."""

    def __init__(self) -> None:
        self.node: Any = None

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        """The tensors, in their order."""
        return self.node.saved_tensors


def save_early(x: Tensor, *others: Tensor) -> tuple[Tensor, SavedTensors]:
    """Pass a tensor on, after it and others have been saved.

    Args:
        x: what the node that follows computes with.
        others: what it saves in addition. Hooks on their gradients run after its backward pass.
    """
    saved = SavedTensors()
    return _Save.apply(x, saved, *others), saved


def is_inside_hooks() -> bool:
    """Return whether hooks take what is saved: a checkpoint around the layer, or a copy to the host."""
    return _top_hooks()(False) is not None


def last_of_each_decoder_layer(model: nn.Module, modules: Collection[nn.Module]) -> set[nn.Module]:
    """Return those modules that are the last ones of a layer that can be checkpointed, in the order of modules."""
    chosen = set(modules)
    layers = (module for module in model.modules() if isinstance(module, GradientCheckpointingLayer))
    inside = ([module for module in layer.modules() if module in chosen] for layer in layers)
    return {of_layer[-1] for of_layer in inside if of_layer}


def not_as_view(output: Tensor) -> Tensor:
    """Return a custom function's output so that models can change it in place, which autograd forbids for a view.

    A linear layer with a bias returns a view, for instance.
    """
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


@functools.cache
def _top_hooks() -> Callable[[bool], object]:
    return existing(existing(torch._C, "_autograd"), "_top_saved_tensors_default_hooks")


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: SavedTensors, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x, *others)
        ctx.set_materialize_grads(False)
        ctx.num_others = len(others)
        saved.node = ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, d_x: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (d_x if ctx.needs_input_grad[0] else None, None, *[None] * ctx.num_others)
